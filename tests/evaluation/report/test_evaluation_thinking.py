"""A draft with thinking on and off is compared prompt by prompt, and what one draft for both costs by seeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_toys import QUICK, full_report, prompts

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.thinking import (
    AskedSample,
    compare_thinking,
    compare_trainings,
    read_asked_sample,
    sum_by_prompt,
)
from draftworks.evaluation.report.writing import render_report, save_report

WALK = prompts([3, 1], [2, 0, 3], [0], [1, 1])
ASKED = {
    "s0": AskedSample("on", "a"),
    "s1": AskedSample("on", "a"),  # the second answer of the same conversation
    "s2": AskedSample("off", "a"),
    "s3": AskedSample("off", "b"),
}


def test_the_difference_is_of_prompts_with_a_pass_both_ways():
    found = compare_thinking(WALK, ASKED, QUICK)
    assert found is not None
    assert (found.on.prompts, found.on.passes, found.on.micro) == (1, 5, pytest.approx(9 / 5))
    assert (found.off.prompts, found.off.passes, found.off.micro) == (2, 3, pytest.approx(2 / 3))
    paired = found.paired
    assert (paired.prompts, paired.only_in_a, paired.only_in_b) == (1, 0, 1)
    assert paired.difference == pytest.approx(9 / 5 - 0)


def test_without_prompts_that_were_asked_both_ways_nothing_is_compared():
    for asked in ({}, {"s0": ASKED["s0"]}, {"s0": ASKED["s0"], "s3": ASKED["s3"]}):
        assert compare_thinking(WALK, asked, QUICK) is None
    assert read_asked_sample({"thinking": "on"}) is None  # as a request asked, but not both ways
    assert read_asked_sample({"thinking": "on", "thinking_pair": "a"}) == AskedSample("on", "a")


counts = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=12)


@given(accepted=counts, data=st.data())
def test_sums_lose_and_add_nothing_and_equal_ways_differ_by_nothing(accepted, data):
    made = prompts(*accepted)
    ways = {
        one.sample_id: AskedSample(data.draw(st.sampled_from(["on", "off"])), "ab"[n % 2]) for n, one in enumerate(made)
    }
    summed = sum_by_prompt(made, ways)
    for name in ("passes", "accepted", "emitted"):
        total = sum(getattr(one, name) for prompts_of in summed.values() for one in prompts_of)
        assert total == sum(getattr(one, name) for one in made)
    twice = prompts(*accepted, *accepted)
    half = len(accepted)
    same = {one.sample_id: AskedSample("on" if n < half else "off", f"p{n % half}") for n, one in enumerate(twice)}
    found = compare_thinking(twice, same, QUICK)
    assert (found is None) == (not any(accepted))
    if found is not None:
        assert (found.paired.difference, found.paired.interval.low, found.paired.interval.high) == (0, 0, 0)


def test_the_page_and_the_file_of_a_report_have_both_ways(tmp_path: Path):
    plain = full_report()
    assert "Thinking" not in render_report(plain)
    asked = {"s0": AskedSample("on", "a"), "s1": AskedSample("off", "a"), "s2": AskedSample("off", "b")}
    report = replace(plain, asked=asked)
    page = render_report(report)
    assert "| on         | 1         | 2        | 3.00" in page
    assert "Thinking on against off, prompt by prompt: +0.33 (+0.33 to +0.33) on 1 prompts" in page
    save_report(report, tmp_path)
    saved = json.loads((tmp_path / "report.json").read_text())["thinking"]
    assert saved["off"]["prompts"] == 2
    assert saved["difference"]["difference"] == pytest.approx(1 / 3)


def accepting(rate: int) -> tuple[PromptAcceptance, ...]:
    """Four prompts of two passes, which accept `rate` tokens each."""
    return prompts(*[[rate, rate]] * 4)


def walk(on: int, off: int):
    return {"on": accepting(on), "off": accepting(off)}


def test_each_training_is_compared_with_the_one_on_that_kind_alone():
    seeds = 2
    walks = {"on": [walk(4, 1)] * seeds, "off": [walk(1, 2)] * seeds, "mixed": [walk(3, 2)] * seeds}
    found = {(one.training, one.way): one for one in compare_trainings(walks, QUICK)}
    assert [one.acceptance.micro for one in found.values()] == [4, 1, 1, 2, 3, 2]
    assert {key: one.loss for key, one in found.items()} == {
        ("on", "on"): None,
        ("on", "off"): pytest.approx(0.5),
        ("off", "on"): pytest.approx(0.75),
        ("off", "off"): None,
        ("mixed", "on"): pytest.approx(0.25),
        ("mixed", "off"): pytest.approx(0.0),
    }
    mixed = found["mixed", "on"]
    assert (mixed.low, mixed.high, mixed.by_seed) == (0.25, 0.25, (0.25, 0.25))
    assert (mixed.acceptance.prompts, mixed.acceptance.passes) == (4, 16)


def test_seeds_that_disagree_widen_the_bounds():
    walks = {"on": [walk(4, 2)] * 2, "off": [walk(4, 2)] * 2, "mixed": [walk(4, 2), walk(2, 2)]}
    (mixed,) = [one for one in compare_trainings(walks, QUICK) if (one.training, one.way) == ("mixed", "on")]
    assert mixed.by_seed == (0.0, 0.5)
    assert mixed.low is not None
    assert mixed.high is not None
    assert mixed.low < 0 < 0.5 < mixed.high


def test_what_accepts_nothing_has_no_loss():
    walks = {name: [walk(0, 1)] for name in ("on", "off", "mixed")}
    found = {(one.training, one.way): one for one in compare_trainings(walks, QUICK)}
    assert found["mixed", "on"].loss is None
    assert found["mixed", "off"].loss == 0
