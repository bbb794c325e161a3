"""Two ranks take the steps of one, and ratios are of turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from train_step import Case
from two_ranks import Race, make_step, print_race, race

from draftworks.training.backend import ensure_process_group

SMALL = Case(24, 2, hidden=16, intermediate=24, vocab=64, draft_vocab=32, ttt=2)


def write_losses(rank: int, folder: Path) -> None:
    step = make_step(SMALL)
    (folder / f"losses-{rank}.json").write_text(json.dumps([step() for _ in range(3)]))


def test_two_ranks_have_the_losses_of_one(tmp_path: Path):
    on_ranks(2, tmp_path, write_losses, tmp_path)
    with ensure_process_group(torch.device("cpu")):
        step = make_step(SMALL)
        alone = [step() for _ in range(3)]
    for rank in range(2):
        found = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_each_side_takes_the_steps_that_it_is_asked_for():
    found = race(SMALL, turns=1, steps=2)
    assert len(found.one) == len(found.two) == 2
    assert min(*found.one, *found.two) > 0


def test_the_ratio_is_of_turns_and_a_missed_aim_is_said(capsys: pytest.CaptureFixture[str]):
    one, two = [0.4, 0.4, 0.6, 0.6], [0.2, 0.2, 0.4, 0.4]
    found = Race(replace(SMALL, length=1000, batch=4), 2, one, two, one_cpu=one, two_cpu=[0.1] * 4)
    assert found.turn_ratios == pytest.approx([2.0, 1.5])
    print_race(found)
    said = capsys.readouterr().out
    assert "| two ranks | 300 (200 to 400) | 13,333 | 100 (100 to 100) | 1.75 (1.50 to 2.00) |" in said
    assert "Not reached: eagle3 1000x4, rate of two ranks / one: 1.75 (aim: at least 1.8)." in said
