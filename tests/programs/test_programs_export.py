"""The export program writes the requested formats and reports the results of the gates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftworks.config.registry_files import ExportSettings
from draftworks.config.run_files import ExportRun, TargetFiles
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.draft_io import save_draft
from draftworks.errors import ConfigError, StoreError
from draftworks.programs.assembly import build_draft
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext

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
