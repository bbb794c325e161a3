"""The walk equals the real loop for every family of targets, and for drafts and targets with windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import gate_or_long
from ladder_toys import (
    TAPS,
    TTT,
    Answers,
    Ladder,
    build_ladder,
    greedy_answers,
    make_draft,
    require_walk_equals_loop,
)
from model_families import FAMILIES, in_float64
from strategy_cases import find_cases
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.ladder.decoding import TargetSession, speculate
from draftworks.evaluation.ladder.loop import get_loop_revision
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import replay

PROMPT, ANSWER, PROPOSED = 21, 16, 3
SUMMING = {"qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe"}
"""Families with layers that keep one state of all that they have read."""
MakeTarget = Callable[[str], TargetFiles]


def loaded(target: TargetFiles) -> PreTrainedModel:
    torch.set_num_threads(1)
    return in_float64(AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).eval())


@pytest.mark.parametrize("name", FAMILIES)
def test_rejected_tokens_leave_no_trace(name: str, family_target: MakeTarget):
    model = loaded(family_target(name))
    said = torch.randint(10, 2000, (PROMPT + ANSWER,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        whole = model(torch.tensor([said]), output_hidden_states=True, use_cache=False)
    session = TargetSession(model, TAPS, rewinds=True)
    session.forward(said[:PROMPT])
    session.rewind_to(PROMPT)
    known = PROMPT
    while known + PROPOSED < len(said):
        accepted = known % (PROPOSED + 1)  # every number, from none to all
        found = session.forward([*said[known : known + 1 + accepted], *[7] * (PROPOSED - accepted)])
        stay = slice(known, known + 1 + accepted)
        torch.testing.assert_close(found.logits[: accepted + 1], whole.logits[0, stay], rtol=0, atol=1e-2)
        for tap in TAPS:
            expected = whole.hidden_states[tap.hf_index][0, stay]
            torch.testing.assert_close(found.features[tap.name][: accepted + 1], expected, rtol=0, atol=1e-2)
        known += accepted + 1
        session.rewind_to(known)


@pytest.mark.parametrize("name", FAMILIES)
def test_loops_of_layers_that_sum_up_are_counted_anew(name: str, family_target: MakeTarget):
    """Others keep what was measured before."""
    assert get_loop_revision(family_target(name)) == (2 if name in SUMMING else 1)


@pytest.mark.parametrize(
    ("name", "strategy"),
    gate_or_long([("qwen3_5", "eagle3"), ("qwen3_next", "dflash"), ("gemma3", "domino")], [("qwen3_next", "dflash")]),
)
def test_the_walk_equals_the_real_loop(name: str, strategy: str, family_target: MakeTarget, tiny_folder: Path):
    target = family_target(name)
    answers = greedy_answers(tiny_folder, prompts=4, max_new_tokens=24, model=loaded(target))
    ladder = build_ladder(answers, target, steps=30, make=partial(make_draft, strategy))
    counted = require_walk_equals_loop(ladder)
    assert sum(one.passes * TTT - one.accepted for one in counted) > 5


WINDOW, EVERYTHING = 6, 4096
"""The one is shorter than any context here, and longer than a proposal; the other hides nothing."""


@pytest.fixture(scope="module")
def answers(tiny_folder) -> Answers:
    torch.set_num_threads(1)
    return greedy_answers(tiny_folder, prompts=3, max_new_tokens=16)


DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in find_cases()},
    "anchored": ("dflash", {"sliding_window_kind": "anchor"}),
    "convolved": ("lilicorr", {"conv_kernel_size": 2, "conv_group_size": 16}),
}


# The others have the backbone of DFlash, and its window; their live drafts with a window are compared with a reader by the
# gates of exports.
@pytest.mark.parametrize("name", gate_or_long(DRAFTS, ["eagle3", "dflash", "anchored", "convolved"]))
def test_the_walk_equals_the_real_loop_and_one_that_ignores_the_window_does_not(
    name: str, answers: Answers, tiny_target: TargetFiles
):
    assert min(len(sample.prompt) for sample in answers.samples) > WINDOW
    make = partial(make_draft, DRAFTS[name][0], **DRAFTS[name][1])
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
