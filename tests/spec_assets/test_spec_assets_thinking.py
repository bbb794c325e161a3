"""A target with shares of thinking, from conversations to a report of both kinds and a comparison of three trainings."""

from __future__ import annotations

import json

import dagster as dg
import pytest
from thinking import THINKING_TEMPLATE

from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.tokenized import TokenizedSet
from draftworks.storage.artifacts import ArtifactStore
from spec_assets.thinking_comparison import describe_comparison

MIX = """
chat_template: thinking.jinja
mix: {shares: {thinking: {on: 0.5, off: 0.5}}}
comparison: {tokens: 600, steps: 2, seeds: 2}
"""


@pytest.mark.long
def test_one_draft_is_trained_on_both_kinds_measured_on_both_and_compared_with_drafts_of_one(site):
    (site.registry / "thinking.jinja").write_text(THINKING_TEMPLATE)
    site.target_file.write_text(site.target_file.read_text() + MIX)
    site.write_chats(36)
    site.evaluate("{loop: {prompts: 0}}")
    artifacts = ArtifactStore(site.var)
    with dg.DagsterInstance.ephemeral() as instance:
        result = site.run("everything", instance=instance)
        assert result.success, [e.message for e in result.all_events if e.is_failure]
        report = artifacts.load_current("eagle3_report", "small")
        measured = json.loads((report.path / "heldout" / "report.json").read_text())["thinking"]
        assert measured["on"]["prompts"] == measured["off"]["prompts"] >= measured["difference"]["prompts"] > 0
        (page,) = result.asset_materializations_for_node("eagle3_report")
        assert page.metadata["walk_acceptance_length_thinking_on"].value == pytest.approx(
            1 + measured["on"]["micro"], abs=1e-3
        )
        assert "asked both ways" in page.metadata["report"].value

        compared = site.run("compare_thinking", instance=instance)
        assert compared.success, [e.message for e in compared.all_events if e.is_failure]
        made = artifacts.load_current("thinking_comparison", "small")
        again = site.run("compare_thinking", instance=instance)
    (hit,) = again.asset_materializations_for_node("thinking_comparison")
    assert hit.metadata["cache"].value == "hit"

    tokens = artifacts.load_current("tokenized_train", "small")
    slices = tokens.summary["slices"]
    assert slices["on"]["samples"] == slices["off"]["samples"]
    heldout = TokenizedSet.open(artifacts.load_current("heldout_responses", "small").path / TOKENS_FOLDER)
    assert {row.columns["thinking"] for row in heldout} == {"on", "off"}
    sets = made.summary["sets"]
    assert max(one["tokens"] for one in sets.values()) <= 600
    found = made.summary["strategies"]["eagle3"]
    assert [(one["training"], one["way"]) for one in found] == [
        (training, way) for training in ("on", "off", "mixed") for way in ("on", "off")
    ]
    assert not list(made.path.rglob("*.safetensors"))  # drafts are not kept
    tables = describe_comparison(made)
    assert "mixed" in tables["acceptance_length"].value
    assert "compared with" in tables["lost"].value
