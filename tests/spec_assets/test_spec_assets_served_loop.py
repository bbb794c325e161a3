"""The loop of served prompts on the embedded target: new traffic that a draft has not learnt, weights for it, their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from served_toys import body, write_log
from typer.testing import CliRunner

from draftworks.data.slices import read_plan
from draftworks.programs.cli import app

SERVED = "files: [../log]\nformat: served\nserved: {source_field: metadata.app}\n"
MIX = """
mix: {datasets: [served]}
evals: [served]
"""
NOUNS = [
    "Hund",
    "Haus",
    "Katze",
    "Baum",
    "Berg",
    "Fluss",
    "Stadt",
    "Brot",
    "Wagen",
    "Brief",
    "Buch",
    "Tisch",
    "Stuhl",
    "Regen",
    "Garten",
    "Wald",
]
VERBS = ["male", "beschreibe", "finde", "kaufe", "suche", "reinige", "zeichne", "repariere"]
GERMAN = [f"Wie {verb} ich bitte einen {noun} für die Familie?" for noun in NOUNS for verb in VERBS]


def ask(corpus: Path, first: int, count: int) -> list[str]:
    """Questions about functions of Python, which the first draft learns."""
    rows = [row for row in pq.read_table(corpus).to_pylist() if row["task"] == "function"]
    return [row["messages"][0]["content"] for row in rows[first :: len(rows) // count][:count]]


def log(site, **prompts: list[str]) -> None:
    rows = [body(text, metadata={"app": app_name}) for app_name, texts in prompts.items() for text in texts]
    write_log(site.root / "log", rows)


def call(site, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--registry", str(site.registry)])
    assert done.exit_code == 0, done.output
    return done.stdout


def run(site, job: str) -> dg.ExecuteInProcessResult:
    result = site.run(job)
    assert result.success, [e.message for e in result.all_events if e.is_failure]
    return result


def read_page(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """What the page of an asset shows after a run."""
    [event] = [e for e in result.get_asset_materialization_events() if e.asset_key == dg.AssetKey(asset)]
    return {name: value.value for name, value in event.materialization.metadata.items()}


@pytest.mark.long
def test_new_traffic_falls_is_weighed_and_the_next_draft_accepts_more_of_it(site, tiny_folder):
    corpus = tiny_folder / "corpus.parquet"
    (site.registry / "datasets" / "served.yaml").write_text(SERVED)
    (site.registry / "evals").mkdir()
    (site.registry / "evals" / "served.yaml").write_text("dataset: served\npart: held_out\n")
    site.evaluate("{loop: {prompts: 0}}")
    entry = site.target_file.read_text().replace("held_out_share: 0.2", "held_out_share: 0.25, max_conversations: 220")
    entry = entry.replace("epochs: 3, lr: 0.002", "epochs: 6, lr: 0.006").replace(
        "max_new_tokens: 16", "max_new_tokens: 48"
    )
    site.target_file.write_text(entry + MIX)
    log(site, docs=ask(corpus, 0, 120), tutor=ask(corpus, 1, 120))
    run(site, "everything")
    call(site, "promote", "small", "eagle3", "--why", "the first")

    log(site, docs=ask(corpus, 2, 120), chat=GERMAN)
    run(site, "evaluate")
    weights = site.registry / "weights.json"
    said = call(site, "slices", "small", "eagle3", "--eval-set", "served", "--save", str(weights))
    plan = read_plan(weights)
    fallen = {(one.column, one.value) for one in plan.weights}
    assert {("source", "chat"), ("language", "de")} <= fallen, said
    assert ("source", "docs") not in fallen
    [chat] = [one for one in plan.weights if one.value == "chat"]
    assert chat.weight == 3.0  # at least a fifth less is accepted

    site.target_file.write_text(entry + MIX.replace("[served]}", f"[served], weights: {weights}}}", 1))
    result = run(site, "everything")
    data = read_page(result, "conversations")
    assert data["weights_have_effect"]
    taken, there = data["weighted_conversations"] / data["train"], len(GERMAN) / data["rows"]
    assert taken > 1.1 * there
    helped = f"Of {len(plan.weights)} slices that this draft's data was weighted towards: {len(plan.weights)} helped."
    assert helped in read_page(result, "eagle3_report")["weighted_slices"]
    assert f"not in service. {helped}" in call(site, "slices", "small", "eagle3")
