"""One name for a draft: what leaderboard, summary, comparison, decision and record show, every command accepts.
The export program writes the requested formats and reports the results of the gates.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from decision_site import HOUR, DecisionSite
from typer.testing import CliRunner

from draftworks.config.exports import ExportSettings
from draftworks.config.run_files import ExportRun, TargetFiles
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.draft_io import save_draft
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.report.text_tables import render_text_table
from draftworks.programs.assembly import build_draft
from draftworks.programs.cli import app
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.summary import build_results_table
from spec_assets.draft_inputs import locate_tuned_draft

NAME = re.compile(r"\b[0-9a-f]{16}\b")


def call(site: DecisionSite, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--registry", str(site.registry)])


def show(site: DecisionSite, *words: str) -> str:
    found = call(site, *words)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    """A draft, and a tune of it, which is in service."""
    site = DecisionSite(tmp_path)
    site.complete(site.publish_draft("a", summary=HOUR), 2.0)
    site.promote()
    site.complete(site.tune("b", summary=HOUR), 2.1)
    site.promote()
    return site


def read_views(site: DecisionSite) -> dict[str, set[str]]:
    """The names of drafts that each view shows."""
    first, second = (record.draft.digest for record in site.open().register.read_history())
    summary = render_text_table(build_results_table("small", site.artifacts))
    rows = [line for line in summary.splitlines() if "eagle3_draft" in line]
    record = json.loads((site.open().register.folder / "in_service.json").read_text())
    said = {
        "leaderboard": show(site, "leaderboard"),
        "summary": "\n".join(rows),
        "compare": show(site, "compare", first, second),
    }
    compared = json.loads(show(site, "compare", first, second, "--json"))
    [begun] = [one["b"] for one in compared["recipe"] if one["key"] == "start_from"]
    sentences = {
        "decide": show(site, "decide", "small", "eagle3"),
        "in-service": show(site, "in-service", "small", "eagle3", "--history"),
    }
    return {
        **{view: set(NAME.findall(text)) for view, text in said.items()},
        **{view: set(re.findall(r"draft ([0-9a-f]{16})\b", text)) for view, text in sentences.items()},
        "compare --json": {compared["a"]["draft"], compared["b"]["draft"], begun},
        "in_service.json": {record["digest"], record["previous"]},
    }


def test_every_name_that_a_view_shows_is_accepted_by_every_command_whole_or_by_its_begin(site: DecisionSite):
    first, second = (record.draft.digest for record in site.open().register.read_history())
    views = read_views(site)
    assert views.pop("leaderboard") == views.pop("summary") == {second}
    assert views == dict.fromkeys(views, {first, second})
    for name in (first, second):
        for given in (name, name[:7]):
            assert f"draft {name}: " in show(site, "promote", "small", "eagle3", "--draft", given, "--dry-run")
            assert f"small/eagle3/{name}" in show(site, "compare", given, f"small/eagle3/{given}")
            assert name in show(site, "pin", "small", "eagle3_draft", "--digest", given)
            show(site, "unpin", "small", "eagle3_draft", given)
            assert locate_tuned_draft(site.artifacts, "small", "eagle3", given).name == name
    moved = show(site, "rollback", "small", "eagle3", "--draft", first[:7], "--expect", second[:7])
    assert f"rollback: draft {first} is in service" in moved


def test_a_data_version_is_answered_with_the_name_of_its_draft(site: DecisionSite):
    record = site.open().register.require()
    name, version = record.draft.digest, record.draft.weights
    for words in (
        ("promote", "small", "eagle3", "--draft", version),
        ("promote", "small", "eagle3", "--expect", version),
        ("rollback", "small", "eagle3", "--draft", version),
        ("compare", version, name),
        ("compare", f"small/eagle3/{version}", name),
        ("pin", "small", "eagle3_draft", "--digest", version),
    ):
        refused = call(site, *words)
        assert refused.exit_code == 1, words
        assert f"give {name}" in refused.stderr, words
    with pytest.raises(ConfigError, match=f"give {name}"):
        locate_tuned_draft(site.artifacts, "small", "eagle3", version)
    assert site.open().register.require() == record


OPTIONS = {"ttt_length": 2, "draft_vocab_size": 64, "intermediate_size": 32}


@pytest.fixture
def run(tmp_path: Path, tiny_target: TargetFiles) -> ExportRun:
    return run_of(tmp_path, tiny_target)


def run_of(folder: Path, target: TargetFiles, **options: Any) -> ExportRun:
    """An untrained draft and an empty folder to export into."""
    build_vocab_mapping(np.arange(target.vocab_size), 64).save(folder / "vocab.safetensors")
    draft = build_draft(target, "eagle3", OPTIONS | options, folder / "vocab.safetensors", seed=1)
    save_draft(folder / "draft", draft.strategy, target.digest)
    (folder / "out").mkdir()
    return ExportRun(out=folder / "out", target=target, draft=folder / "draft")


def test_every_format_that_fits_gets_a_folder(run: ExportRun):
    report = export(run, ProgramContext())
    assert (
        sorted(report["formats"])
        == ["sglang_eagle3", "speculators_eagle3"]
        == sorted(p.name for p in run.out.iterdir())
    )
    for name, result in report["formats"].items():
        assert result["passed"]
        assert result["dtype"] == "bfloat16"
        assert result["nbytes"] == (run.out / name / "model.safetensors").stat().st_size
    assert report["refused"] == {}


def test_only_the_formats_that_were_asked_for(run: ExportRun):
    settings = ExportSettings(formats=["speculators_eagle3"], dtype="float32")
    report = export(run.model_copy(update={"export": settings}), ProgramContext())
    assert [path.name for path in run.out.iterdir()] == ["speculators_eagle3"]
    assert report["formats"]["speculators_eagle3"]["dtype"] == "float32"


def test_an_unknown_format_is_refused_before_anything_is_written(run: ExportRun):
    settings = ExportSettings(formats=["sglang_eagle3", "gguf"])
    with pytest.raises(ConfigError, match="no export format 'gguf'"):
        export(run.model_copy(update={"export": settings}), ProgramContext())
    assert list(run.out.iterdir()) == []


def test_a_draft_that_no_format_can_hold_is_an_error_and_no_empty_export(tmp_path: Path, tiny_target: TargetFiles):
    run = run_of(tmp_path, tiny_target, norm_output=False)
    with pytest.raises(ConfigError, match=r"sglang_eagle3: norm_output: false.*speculators_eagle3: norm_output: false"):
        export(run, ProgramContext())
    assert list(run.out.iterdir()) == []


def test_the_card_goes_beside_the_weights(run: ExportRun, tmp_path: Path):
    (tmp_path / "card.md").write_text("# What it is worth\n")
    export(run.model_copy(update={"card": tmp_path / "card.md"}), ProgramContext())
    for folder in run.out.iterdir():
        assert (folder / "README.md").read_text().startswith("# What it is worth\n")


def test_a_missing_card_is_an_error(run: ExportRun, tmp_path: Path):
    with pytest.raises(StoreError, match=r"card\.md: the model card cannot be read"):
        export(run.model_copy(update={"card": tmp_path / "card.md"}), ProgramContext())


def test_the_run_file_works_by_hand(run: ExportRun, tmp_path: Path):
    path = run.save(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "draftworks.programs.export", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sglang_eagle3: all 11 gates passed" in done.stdout
    report = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert list(report["formats"]) == ["sglang_eagle3", "speculators_eagle3"]
