"""A sliding window holds in the real loop as in training: walk and loop agree, and a loop without it would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from coverings import gate_or_long
from ladder_toys import (
    LADDER_DRAFTS,
    TAPS,
    TTT,
    Answers,
    Ladder,
    Sample,
    build_ladder,
    dflash,
    eagle3,
    greedy_answers,
    lilicorr,
)

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.ladder.decoding import speculate
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import replay

WINDOW, EVERYTHING = 6, 4096
"""The one is shorter than any context here, and longer than a proposal; the other hides nothing."""


@pytest.fixture(scope="module")
def answers(tiny_folder) -> Answers:
    torch.set_num_threads(1)
    return greedy_answers(tiny_folder, prompts=3, max_new_tokens=16)


def anchored(parts: TargetParts, samples: list[Sample], **options: Any) -> DraftStrategy:
    return dflash(parts, samples, sliding_window_kind="anchor", **options)


def convolved(parts: TargetParts, samples: list[Sample], **options: Any) -> DraftStrategy:
    return lilicorr(parts, samples, conv_kernel_size=2, conv_group_size=16, **options)


# The others have the backbone of DFlash, and its window; their live drafts with a window are compared with a reader by the
# gates of exports.
@pytest.mark.parametrize(
    "make",
    gate_or_long([*LADDER_DRAFTS, anchored, convolved], [eagle3, dflash, anchored, convolved]),
    ids=lambda make: make.__name__,
)
def test_the_walk_equals_the_real_loop_and_one_that_ignores_the_window_does_not(
    make: Callable[..., DraftStrategy], answers: Answers, tiny_target: TargetFiles
):
    assert min(len(sample.prompt) for sample in answers.samples) > WINDOW
    ladder = build_ladder(answers, tiny_target, steps=25, make=partial(make, sliding_window=WINDOW))
    walks = [one.walk for one in replay(ladder.strategy, ladder.batch(ladder.samples), TTT)]
    assert decode_all(ladder) == walks
    assert sum(walk.accepted for walk in walks) > 5
    ignoring = make(TargetParts.load(tiny_target), answers.samples, sliding_window=EVERYTHING)
    ignoring.model.double().load_state_dict(ladder.strategy.model.state_dict())
    assert decode_all(replace(ladder, strategy=ignoring)) != walks


def decode_all(ladder: Ladder) -> list[PromptAcceptance]:
    return [
        speculate(ladder.model, ladder.strategy, TAPS, one.prompt, ladder.limits, TTT, sample_id=one.name).acceptance
        for one in ladder.samples
    ]
