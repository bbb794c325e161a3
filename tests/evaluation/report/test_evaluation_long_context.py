"""A draft that was trained on short texts dies late in long ones, the report says so, and a window keeps it alive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from long_target import LongTarget, teach_draft, walk_by_position
from report_toys import QUICK, full_report

from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.report.late_fall import find_late_fall
from draftworks.evaluation.report.markdown import render_report

TRAINED_ON, ANSWER, WINDOW = 96, 40, 24


@pytest.mark.parametrize(
    ("length", "ranges"),
    [(2048, 4), pytest.param(32_768, 8, marks=pytest.mark.long)],
    ids=["2k", "32k"],
)
def test_a_draft_that_knows_short_texts_dies_late_and_one_with_a_window_lives(length: int, ranges: int):
    torch.set_num_threads(1)
    target = LongTarget.make()
    samples = target.capture_long_texts(length, ANSWER)
    dying, living = (
        walk_by_position(teach_draft(target, TRAINED_ON, 110, window), samples) for window in (None, WINDOW)
    )
    assert list(dying) == list(living) == [0, *(256 * 2**power for power in range(ranges - 1))]
    early, *late = [micro_mean(prompts) for prompts in dying.values()]
    assert early > 2
    assert max(late) < 0.5 * early
    assert min(micro_mean(prompts) for prompts in living.values()) > 2
    assert find_late_fall(living, QUICK) is None
    report = full_report()
    measured = replace(report.drafts["trained"], walk_by_position=dying)
    text = render_report(replace(report, drafts={"trained": measured}))
    assert (
        f"**Late in the text the draft accepts less:** τ {1 + late[-1]:.2f} at {length // 2}-{length - 1}, {1 + early:.2f}"
        in text
    )
