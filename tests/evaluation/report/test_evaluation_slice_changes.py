"""Slices of two reports: a true change is found in the slice that has it, and hardly any is named where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.data.slices import SlicePlan
from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.slice_changes import (
    MeasuredPrompts,
    adjust_by_holm,
    compare_slices,
    plan_weights,
)

ABOUT = SlicePlan("toy", "eagle3", "heldout", "new", "old", 1.0, ())
PASSES = 20


def measure(
    means: dict[str, float], draft: str, seed: int, prompts: int = 30, first: int = 0, draft_tokens: int = 5
) -> MeasuredPrompts:
    """A draft that accepts Poisson numbers of tokens of these means by language, on as many prompts of each."""
    rng = np.random.default_rng(seed)
    walk, columns = {}, {}
    for language, mean in means.items():
        for number in range(first, first + prompts):
            total = int(rng.poisson(mean * PASSES))
            accepted = [total // PASSES + (place < total % PASSES) for place in range(PASSES)]
            name = f"{language}{number}"
            walk[name] = PromptAcceptance.from_accepted_counts(name, accepted, total + PASSES)
            columns[name] = {"language": language, "thinking": "on" if number % 2 else "off"}
    contents = {name: f"tokens of {name}" for name in walk}
    return MeasuredPrompts(f"report {seed}", draft, draft_tokens, walk, contents, columns, Resampling(resamples=400))


def by_value(changes) -> dict[str, str]:
    return {one.value: one.verdict for one in changes}


def test_the_slice_that_fell_is_named_with_its_figures_paired_where_prompts_are_shared():
    old = measure({"en": 2.0, "de": 2.0}, "a", 1)
    new = measure({"en": 2.0, "de": 1.4}, "b", 2)
    changes = compare_slices(new, old, ["language"])
    assert by_value(changes) == {"de": "fell", "en": "no clear change"}
    [fallen] = [one for one in changes if one.verdict == "fell"]
    assert (fallen.compared, fallen.prompts) == ("paired", 30)
    assert fallen.difference == pytest.approx(-0.6, abs=0.2)
    assert fallen.interval is not None
    assert fallen.interval.low < fallen.difference < fallen.interval.high < 0
    back = compare_slices(old, new, ["language"])
    assert by_value(back) == {"de": "rose", "en": "no clear change"}


def test_one_draft_and_new_traffic_is_compared_unpaired():
    old = measure({"en": 2.0, "de": 2.0}, "a", 1)
    for first in (0, 100):  # the same prompts, or others
        new = measure({"en": 2.0, "de": 1.3}, "a", 3, first=first)
        changes = compare_slices(new, old, ["language"])
        assert {one.compared for one in changes} == {"unpaired"}
        assert by_value(changes) == {"de": "fell", "en": "no clear change"}
    other = measure({"en": 2.0, "de": 1.3}, "b", 3, first=100)
    assert {one.compared for one in compare_slices(other, old, ["language"])} == {"unpaired"}


def test_answers_that_were_generated_again_are_other_prompts():
    old, new = measure({"en": 2.0, "de": 2.0}, "a", 1), measure({"en": 2.0, "de": 2.0}, "b", 2)
    again = MeasuredPrompts(**{**vars(new), "contents": {name: f"other {name}" for name in new.prompts}})
    assert {one.compared for one in compare_slices(again, old, ["language"])} == {"unpaired"}


def test_slices_with_few_prompts_or_in_one_report_only_are_listed_and_not_judged():
    old = measure({"en": 2.0, "de": 2.0}, "a", 1, prompts=30)
    new = measure({"en": 0.1, "fr": 0.1}, "b", 2, prompts=19)
    changes = compare_slices(new, old, ["language"])
    assert by_value(changes) == dict.fromkeys(("de", "en", "fr"), "too few prompts")
    assert all(one.difference is None for one in changes)
    with pytest.raises(DataError, match="5 tokens per pass were proposed .* 3 in"):
        compare_slices(new, measure({"en": 2.0}, "a", 1, draft_tokens=3))


def test_a_slice_that_was_not_there_is_compared_with_all_that_was():
    old = measure({"en": 2.0, "de": 1.6}, "a", 1)
    new = measure({"en": 2.0, "fr": 1.2, "it": 1.8, "ja": 2.6}, "a", 2, first=100)
    changes = compare_slices(new, old, ["language"])
    found = {one.value: (one.compared, one.verdict) for one in changes}
    assert found == {
        "de": (None, "too few prompts"),
        "en": ("unpaired", "no clear change"),
        "fr": ("with all", "fell"),
        "it": ("with all", "no clear change"),
        "ja": ("with all", "rose"),
    }
    [fallen] = plan_weights(changes, ABOUT).weights
    assert (fallen.value, fallen.weight) == ("fr", 3.0)
    assert (fallen.before, fallen.after) == (pytest.approx(1.8, abs=0.1), pytest.approx(1.2, abs=0.1))
    [asked] = compare_slices(new, old, only=[("language", "fr")])
    assert asked.compared is None


def test_without_a_change_slices_are_named_in_few_comparisons():
    means = dict.fromkeys(["de", "en", "es", "fr", "it", "ja"], 2.0)
    named = 0
    for trial in range(60):
        old, new = measure(means, "a", 2 * trial), measure(means, "b", 2 * trial + 1, first=100 * (trial % 2))
        named += any(one.verdict in ("fell", "rose") for one in compare_slices(new, old))
    assert named <= 8  # of 60 at 5%: more than 8 would be a matter of 1 in 300


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_raises_p_values_keeps_their_order_and_bounds_the_first_by_bonferroni(p_values):
    adjusted = adjust_by_holm(p_values)
    assert all(after >= before for before, after in zip(p_values, adjusted))
    assert all(after <= 1 for after in adjusted)
    for one in range(len(p_values)):
        for other in range(len(p_values)):
            assert p_values[one] > p_values[other] or adjusted[one] <= adjusted[other]
    if p_values:
        assert min(adjusted) == min(1.0, len(p_values) * min(p_values))


def test_holm_of_known_values():
    assert adjust_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@settings(max_examples=15)
@given(
    falls=st.dictionaries(st.sampled_from(["de", "en", "fr"]), st.floats(0.2, 3.0), min_size=2), bound=st.floats(1, 10)
)
def test_a_plan_weighs_exactly_the_slices_that_fell_within_its_bound(falls, bound):
    old, new = measure(dict.fromkeys(falls, 2.0), "a", 1), measure(falls, "b", 2)
    changes = compare_slices(new, old, ["language", "thinking"])
    plan = plan_weights(changes, ABOUT, bound)
    fell = {(one.column, one.value) for one in changes if one.verdict == "fell"}
    assert {(one.column, one.value) for one in plan.weights} == fell
    assert all(1 <= one.weight <= bound + 0.01 for one in plan.weights)
    assert plan_weights(changes, ABOUT, bound) == plan


def test_only_the_slices_asked_for_are_looked_at():
    old, new = measure({"en": 2.0, "de": 2.0}, "a", 1), measure({"en": 2.0, "de": 1.4}, "b", 2)
    [one] = compare_slices(new, old, only=[("language", "de")])
    assert one.verdict == "fell"
    assert compare_slices(new, old, only=[]) == ()
