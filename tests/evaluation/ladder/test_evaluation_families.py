"""Rung 4 with targets of every family: rejected tokens leave no trace in any kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from ladder_toys import TAPS, TTT, MakeDraft, build_ladder, dflash, domino, eagle3, greedy_answers
from model_families import FAMILIES, in_float64
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftworks.config.decoding import GREEDY
from draftworks.config.run_files import TargetFiles
from draftworks.evaluation.ladder.loop import DecodingLoop, get_loop_revision
from draftworks.evaluation.ladder.prompts import Prompt
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.evaluation.ladder.target_session import TargetSession

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
    ("name", "make"),
    gate_or_long([("qwen3_5", eagle3), ("qwen3_next", dflash), ("gemma3", domino)], [("qwen3_next", dflash)]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_walk_equals_the_real_loop(name: str, make: MakeDraft, family_target: MakeTarget, tiny_folder: Path):
    """Count for count, but for near ties: the gated delta rule of transformers is fp32 whatever the model's dtype is."""
    target = family_target(name)
    answers = greedy_answers(tiny_folder, prompts=4, max_new_tokens=24, model=loaded(target))
    ladder = build_ladder(answers, target, steps=30, make=make)
    names = {sample.name for sample in ladder.samples}
    walked = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), names)
    loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0)
    prompts = [Prompt(sample.name, sample.prompt) for sample in ladder.samples]
    found = loop.measure(prompts, GREEDY, {one.walk.sample_id: one.first_answer for one in walked})
    assert all(one.gap is not None and one.gap < 1e-4 for one in found.differences)
    tied = {one.sample_id for one in found.differences}
    assert len(tied) < 2
    walks = {one.walk.sample_id: one.walk for one in walked}
    assert all(walks[one.sample_id] == one for one in found.prompts if one.sample_id not in tied)
    assert sum(one.accepted for one in found.prompts) > 5
    assert sum(one.passes * TTT - one.accepted for one in found.prompts) > 5
