"""Drafts trained on samples, compared by their walks: before features are stored in fp8, and for thinking on and off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from thinking import THINKING_TEMPLATE

from draftworks.config.capture import CaptureSpec
from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.config.service import GateSpec
from draftworks.data.tokenized import TokenizedSet
from draftworks.evaluation.ladder.relative_loss import RelativeLoss
from draftworks.features.manifest import read_feature_set
from draftworks.preflight.findings import Findings
from draftworks.preflight.plausible_values import Fp8GateClosed, check_fp8_gate, require_passed_fp8_gate
from draftworks.storage.artifacts import Artifact, ArtifactStore
from spec_assets.inputs import list_trained_strategies
from spec_assets.thinking_comparison import describe_comparison

TARGET = TargetSpec(
    name="t", model="m", dataset="d", capture=CaptureSpec(storage="fp8"), strategies={"eagle3": StrategyEntry()}
)
SMALL = RelativeLoss("undecided", 0.004, -0.004, 0.012, 0.95, (0.0, 0.008), 200, 0.02)
GATE = Artifact("fp8_gate", "t", Path("/nowhere"), {"target": "w" * 16, "storage": "fp8"}, "v", {}, {}, 0.0, 0.0)


def with_loss(**changes: Any) -> Artifact:
    return replace(GATE, summary={"strategies": {"eagle3": replace(SMALL, **changes).to_json()}})


def require(gate: Artifact | None, target: TargetSpec = TARGET, strategy: str = "eagle3") -> None:
    artifacts: Any = SimpleNamespace(find=lambda asset, name: gate)
    require_passed_fp8_gate(artifacts, target, "w" * 16, [strategy])


def with_gates(**gates: Any) -> TargetSpec:
    return TARGET.model_copy(update={"gates": GateSpec(**gates)})


def test_a_passed_gate_a_plain_storage_and_a_deliberate_override_let_a_training_begin():
    require(with_loss())
    require(None, TARGET.model_copy(update={"capture": CaptureSpec()}))
    require(None, with_gates(fp8_ungated=True))
    require(with_loss(loss=0.04, low=0.03, high=0.05), with_gates(fp8_max_loss=0.05))


@pytest.mark.parametrize(
    ("gate", "strategy", "message"),
    [
        (
            None,
            "eagle3",
            r"was not measured. Run: draftworks run judge_fp8 --target t, or set capture.storage to plain",
        ),
        (
            replace(with_loss(), identity={"target": "x" * 16, "storage": "fp8"}),
            "eagle3",
            "weights xxxxxxxxxxxx, not for",
        ),
        (replace(with_loss(), identity={"target": "w" * 16, "storage": "fp8_taps"}), "eagle3", "for storage fp8_taps"),
        (with_loss(), "dflash", "what dflash drafts lose by that was not measured"),
        (with_loss(high=0.03), "eagle3", r"eagle3: undecided: .*allowed 2.00%. About 52[89] prompts and 6 seeds would"),
        (with_loss(loss=0.03, low=0.0, high=0.06), "eagle3", r"eagle3: refused: relative loss of the walk \+3.00%"),
    ],
    ids=["none", "weights", "storage", "strategy", "undecided", "refused"],
)
def test_anything_else_is_refused_with_the_reason(gate: Artifact | None, strategy: str, message: str):
    with pytest.raises(Fp8GateClosed, match=message):
        require(gate, strategy=strategy)


@pytest.mark.parametrize(("storage", "warnings"), [("fp8", 1), ("plain", 0)])
def test_a_closed_gate_is_a_warning_of_check(tmp_path: Path, storage: Any, warnings: int):
    findings = Findings()
    target = TARGET.model_copy(update={"capture": CaptureSpec(storage=storage)})
    check_fp8_gate(ArtifactStore(tmp_path), target, "w" * 16, findings)
    assert findings.errors == []
    assert len(findings.found) == warnings
    assert all("draftworks run judge_fp8 --target t" in one.text for one in findings.found)


@pytest.mark.parametrize(
    ("selected", "trained"),
    [
        ({"target_model", "training_features"}, ["eagle3", "dflash"]),
        ({"target_model", "dflash_draft"}, ["dflash"]),
        ({"target_model", "fp8_gate", "training_features"}, []),
        ({"target_model", "tokenized_train", "eagle3_report"}, []),
    ],
)
def test_a_run_needs_the_gate_for_what_it_trains(selected: set[str], trained: list[str]):
    entries = {"eagle3": StrategyEntry(), "dflash": StrategyEntry()}
    assert list_trained_strategies(TARGET.model_copy(update={"strategies": entries}), selected) == trained


@pytest.mark.long
def test_fp8_is_refused_until_the_gate_has_passed_and_then_trained_on(site) -> None:
    text = site.target_file.read_text()
    gates = "gates: {fp8_samples: 12, fp8_steps: 2, fp8_max_loss: 0.999}\n"
    site.target_file.write_text(text.replace("{dtype: float32", "{storage: fp8_taps, dtype: bfloat16") + gates)
    site.write_chats(24)
    refused = site.run("prepare")
    assert not refused.success
    (failure,) = [event for event in refused.all_events if event.is_step_failure]
    assert failure.step_key == "target_model"  # before any answer
    assert "draftworks run judge_fp8 --target small" in failure.step_failure_data.user_failure_data.description

    with dg.DagsterInstance.ephemeral() as instance:
        gated = site.run("judge_fp8", instance=instance)
        assert gated.success
        made = ArtifactStore(site.var).load_current("fp8_gate", "small")
        assert made.summary["run"] == {"samples": 12, "steps": 2, "seeds": 2}
        found = RelativeLoss.from_json(made.summary["strategies"]["eagle3"])
        assert len(found.by_seed) == 2
        assert found.prompts > 0
        assert not list(made.path.rglob("*.safetensors"))  # drafts are not kept
        again = site.run("judge_fp8", instance=instance)
        hits = [each.metadata["cache"].value for each in again.asset_materializations_for_node("fp8_gate")]
        assert hits == ["hit"]
    if found.verdict != "passed":
        site.target_file.write_text(
            site.target_file.read_text().replace("fp8_max_loss", "fp8_ungated: true, fp8_max_loss")
        )
    assert site.run("prepare").success
    features = ArtifactStore(site.var).load_current("training_features", "small")
    specs = read_feature_set(features.path).refs[0].feature_specs
    assert [spec.dtype for spec in specs.values()] == [*["float8_e4m3fn"] * 3, "bfloat16"]


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
