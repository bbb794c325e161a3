"""One draft with thinking on and off: counts of a prompt are summed, and the difference is of the same prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_toys import QUICK, full_report, prompts

from draftworks.evaluation.report.markdown import render_report
from draftworks.evaluation.report.thinking import AskedSample, compare_thinking, read_asked_sample, sum_by_prompt
from draftworks.evaluation.report.writing import save_report

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
