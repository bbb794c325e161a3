"""A quantised draft is walked over the held-out answers, with what its blocks hold, before it is handed out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_run_files import OPTIONS, RunFiles

from draftworks.config.exports import ExportSettings
from draftworks.config.run_files import ExportRun, TargetFiles
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.programs import export as program
from draftworks.programs.assembly import build_draft
from draftworks.programs.program import ProgramContext

FORMATS = ["sglang_eagle3", "gguf_eagle3"]


@pytest.fixture
def run(tmp_path: Path, tiny_target: TargetFiles) -> ExportRun:
    files = RunFiles.make(tmp_path, tiny_target)
    measured = files.evaluate_run()
    draft = build_draft(tiny_target, "eagle3", OPTIONS, measured.vocab_mapping, seed=1)
    save_draft(tmp_path / "draft", draft.strategy, tiny_target.digest)
    (tmp_path / "out").mkdir()
    settings = ExportSettings.model_validate(
        {
            "formats": FORMATS,
            "dtype": "float32",
            "gguf": {"quantise": "q8_0", "least_kept": 0.9},
        }
    )
    sets = {"heldout": measured.heldout, "store": measured.store}
    return ExportRun(out=tmp_path / "out", target=tiny_target, draft=tmp_path / "draft", export=settings, **sets)


def test_its_acceptance_length_is_beside_that_of_the_draft_as_it_is(run: ExportRun):
    made = program.export(run, ProgramContext())["formats"]
    assert all(one["passed"] for one in made.values())
    assert "quantised" not in made["sglang_eagle3"]
    walked = made["gguf_eagle3"]["quantised"]
    assert walked["prompts"] == 3
    assert walked["length"] == pytest.approx(walked["plain_length"] * walked["kept"])
    assert walked["plain_length"] >= 1
    assert "q8_0: acceptance length τ" in (run.out / "gguf_eagle3" / "README.md").read_text()


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What walks give: of a draft whose rows of 32 numbers are 255 values apart at most, and of others."""
    found = {"whole": 2.0, "in_blocks": 1.9}

    def walk(run: ExportRun, strategy: DraftStrategy, ctx: ProgramContext) -> Any:
        blocks = strategy.model.state_dict()["fc.weight"].unflatten(-1, (-1, 32)).flatten(0, 1)
        steps = blocks / (blocks.abs().amax(-1, keepdim=True) / 127)
        held = torch.allclose(steps, steps.round(), atol=0.1)  # the scale is of half precision
        return program._Walked(found["in_blocks" if held else "whole"], 3)

    monkeypatch.setattr(program, "_walk", walk)
    return found


def test_the_walk_is_of_what_the_blocks_hold(run: ExportRun, lengths: dict[str, float]):
    walked = program.export(run, ProgramContext())["formats"]["gguf_eagle3"]["quantised"]
    assert (walked["length"], walked["plain_length"], walked["kept"]) == (1.9, 2.0, 0.95)


def test_one_that_accepts_too_little_is_not_written(run: ExportRun, lengths: dict[str, float]):
    lengths["in_blocks"] = 1.7
    with pytest.raises(
        ConfigError, match=r"gguf_eagle3: q8_0: .* 1\.700 on 3 .* 2\.000 .* 85\.0% .* expected 90\.0% at least"
    ):
        program.export(run, ProgramContext())
    assert list(run.out.iterdir()) == []


def test_without_answers_to_walk_it_is_refused(run: ExportRun):
    with pytest.raises(ConfigError, match="expected `heldout` and `store`, found none"):
        program.export(run.model_copy(update={"heldout": None}), ProgramContext())
