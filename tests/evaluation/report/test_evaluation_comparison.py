"""A new draft is compared with the one it replaces on the same prompts; without any, the reason is given.
A draft with thinking on and off is compared prompt by prompt, and what one draft for both costs by seeds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_folders import ASSET, TARGET, ReportFolders
from report_toys import QUICK, full_report, prompts

from draftworks.errors import StoreError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.comparison import ReplacedDraftComparison, compare_with_replaced_draft
from draftworks.evaluation.report.thinking import (
    AskedSample,
    compare_thinking,
    compare_trainings,
    read_asked_sample,
    sum_by_prompt,
)
from draftworks.evaluation.report.writing import render_report, save_report

SAMPLES = {f"s{index}": [index, 7, 8, 9] for index in range(12)}
GOOD = {name: [3, 2, 3] for name in SAMPLES}
MIXED = {name: [3, 3, 3] if index % 2 else [2, 2, 2] for index, name in enumerate(SAMPLES)}
BAD = {name: [1, 0, 1] for name in SAMPLES}


@pytest.fixture
def folders(tmp_path: Path) -> ReportFolders:
    return ReportFolders(tmp_path)


def compared(folders: ReportFolders) -> ReplacedDraftComparison:
    return compare_with_replaced_draft(folders.artifacts, ASSET, TARGET)


@pytest.mark.parametrize(
    ("before", "after", "worse", "verdict"),
    [
        (GOOD, BAD, True, "fewer are accepted"),
        (BAD, GOOD, False, "more are accepted"),
        (GOOD, MIXED, False, "no clear difference"),
    ],
)
def test_worse_is_a_draft_whose_whole_interval_lies_below_zero(folders: ReportFolders, before, after, worse, verdict):
    answers = folders.publish_answers(SAMPLES)
    old, new = folders.publish_report("old", answers, before), folders.publish_report("new", answers, after)
    found = compared(folders)
    assert (found.is_worse, found.paired.prompts) == (worse, 12)
    assert verdict in found.describe()
    difference = sum(map(sum, after.values())) / 36 - sum(map(sum, before.values())) / 36
    assert found.paired.difference == pytest.approx(difference)
    shown = found.to_json()
    assert (shown["draft"], shown["draft_before"], shown["prompts"]) == ("new", "old", 12)
    assert (shown["report"], shown["report_before"]) == (str(new.path), str(old.path))
    assert shown["low"] <= shown["difference"] <= shown["high"]


def test_only_prompts_with_the_same_tokens_and_mask_count(folders: ReportFolders):
    """Five prompts are answered anew: on them the old draft was far better, which must not be seen."""
    changed = {name: [*ids[:-1], 1] if name in list(SAMPLES)[:5] else ids for name, ids in SAMPLES.items()}
    old = {name: [3, 3] if name in list(SAMPLES)[:5] else [1, 1] for name in SAMPLES}
    folders.publish_report("old", folders.publish_answers(SAMPLES), old)
    folders.publish_report("new", folders.publish_answers(changed), dict.fromkeys(SAMPLES, [1, 1]))
    found = compared(folders)
    assert (found.paired.prompts, found.paired.difference) == (7, 0.0)


def test_eval_data_that_has_grown_still_compares_on_what_was_there(folders: ReportFolders):
    few = dict(list(SAMPLES.items())[:6])
    folders.publish_report("old", folders.publish_answers(few), {name: GOOD[name] for name in few})
    folders.publish_report("new", folders.publish_answers(SAMPLES), BAD)
    found = compared(folders)
    assert (found.is_worse, found.paired.prompts) == (True, 6)


def test_the_draft_before_is_the_newest_with_other_weights(folders: ReportFolders):
    """The same weights measured again are no predecessor of themselves."""
    answers = folders.publish_answers(SAMPLES)
    folders.publish_report("oldest", answers, BAD)
    folders.publish_report("old", answers, GOOD)
    more = folders.publish_answers({**SAMPLES, "s99": [1, 2, 3]})
    for known in (answers, more):
        folders.publish_report("new", known, MIXED)
    assert compared(folders).old.identity["draft"] == "old"


def test_a_report_that_was_made_later_is_not_the_one_before(folders: ReportFolders):
    answers = folders.publish_answers(SAMPLES)
    for draft in ("first", "second", "first"):
        folders.publish_report(draft, answers, GOOD)
    found = compared(folders)
    assert found.old is None
    assert "an older draft is current again" in found.describe()


def test_reports_that_proposed_different_numbers_of_tokens_do_not_compare(folders: ReportFolders):
    """Of fewer proposals fewer are accepted: that is no fault of the draft."""
    answers = folders.publish_answers(SAMPLES)
    folders.publish_report("old", answers, GOOD, draft_tokens=7)
    folders.publish_report("new", answers, BAD, draft_tokens=3)
    found = compared(folders)
    assert (found.is_worse, found.paired, found.old.identity["draft"]) == (False, None, "old")
    assert "3 tokens per pass were proposed now, 7 in the report before it" in found.describe()


def test_a_first_draft_has_nothing_to_be_compared_with(folders: ReportFolders):
    folders.publish_report("new", folders.publish_answers(SAMPLES), GOOD)
    found = compared(folders)
    assert not found.is_worse
    assert found.describe() == "nothing to compare: it is the first draft of this target and strategy"
    assert set(found.to_json()) == {"draft", "report"}


@pytest.mark.parametrize(
    ("samples", "masked", "accepted"),
    [
        ({name: [*ids[:-1], 1] for name, ids in SAMPLES.items()}, 0, BAD),
        (SAMPLES, 1, BAD),
        ({f"new-{name}": ids for name, ids in SAMPLES.items()}, 0, {f"new-{name}": [0] for name in SAMPLES}),
        (SAMPLES, 0, {}),
        (SAMPLES, 0, dict.fromkeys(SAMPLES, [])),
    ],
    ids=["other answers", "other masks", "other prompts", "no walk", "no pass"],
)
def test_without_a_shared_prompt_nothing_is_compared(folders: ReportFolders, samples, masked, accepted):
    folders.publish_report("old", folders.publish_answers(SAMPLES), GOOD)
    folders.publish_report("new", folders.publish_answers(samples, masked), accepted)
    found = compared(folders)
    assert (found.is_worse, found.paired, found.old.identity["draft"]) == (False, None, "old")
    assert "no held-out prompt has the same tokens" in found.describe()


@pytest.mark.parametrize("lost", ["heldout/prompts.parquet", "heldout/report.json"])
def test_a_damaged_report_before_is_no_fault_of_the_new_draft(folders: ReportFolders, lost: str):
    answers = folders.publish_answers(SAMPLES)
    old = folders.publish_report("old", answers, GOOD)
    folders.publish_report("new", answers, BAD)
    (old.path / lost).unlink()
    assert f"the report before it cannot be used: {old.path / lost}" in compared(folders).describe()


def test_answers_that_are_not_there_any_more_are_said_to_be_missing(folders: ReportFolders):
    old = folders.publish_report("old", folders.publish_answers({"s0": [1, 2]}), {"s0": [1]})
    folders.publish_report("new", folders.publish_answers(SAMPLES), GOOD)
    oldest = folders.artifacts.list_all("heldout_responses", TARGET)[-1]
    shutil.rmtree(oldest.path)
    assert f"{old.path}: the heldout_responses {oldest.data_version}" in compared(folders).describe()


def test_a_damaged_new_report_is_an_error(folders: ReportFolders):
    answers = folders.publish_answers(SAMPLES)
    folders.publish_report("old", answers, GOOD)
    new = folders.publish_report("new", answers, GOOD)
    (new.path / "heldout" / "prompts.parquet").write_bytes(b"x")
    with pytest.raises(StoreError, match="prompts.parquet"):
        compared(folders)


def test_it_needs_no_torch():
    script = "import sys, draftworks.evaluation.report.comparison; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
