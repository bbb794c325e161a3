"""Slices partition the prompts, and their labels tell what is in them.
Slices of two reports: a true change is found in the slice that has it, and hardly any is named where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.data.slices import SlicePlan
from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling, adjust_by_holm, summarize_acceptance
from draftworks.evaluation.report.comparison import MeasuredWalk
from draftworks.evaluation.report.slice_changes import compare_slices, plan_weights
from draftworks.evaluation.report.slices import MISSING, iterate_slices, measure_slices

QUICK = Resampling(resamples=50)


def prompts_of(count: int) -> list[PromptAcceptance]:
    """Return prompts that all have different acceptance."""
    return [
        PromptAcceptance.from_accepted_counts(f"s{index:02}", [index % 4, *[1] * (index % 3)], emitted=5)
        for index in range(count)
    ]


def slice_acceptance(prompts: list[PromptAcceptance], columns: pd.DataFrame, by: list[str], resampling=QUICK):
    return measure_slices(iterate_slices(prompts, columns, by), resampling)


def by_one(values: list, **options) -> pd.DataFrame:
    """Slice as many prompts by a column of these values."""
    prompts = prompts_of(len(values))
    columns = pd.DataFrame({"it": values}, index=[prompt.sample_id for prompt in prompts], **options)
    return slice_acceptance(prompts, columns, ["it"])


def sizes(table: pd.DataFrame) -> dict[str, int]:
    return dict(zip(table["value"], table["prompts"]))


def test_slices_by_hand() -> None:
    prompts = [
        PromptAcceptance.from_accepted_counts("a", [2, 2], 6),
        PromptAcceptance.from_accepted_counts("b", [0, 1, 1], 5),
        PromptAcceptance.from_accepted_counts("c", [3], 4),
    ]
    columns = pd.DataFrame(
        {"task": ["code", "chat", "code"], "language": ["de", "en", "en"], "unused": 0}, index=list("abc")
    )
    table = slice_acceptance(prompts, columns, ["task", "language"], Resampling())
    assert table.columns.tolist() == [
        "column",
        "value",
        "prompts",
        "passes",
        "accepted",
        "micro",
        "macro",
        "low",
        "high",
    ]
    assert table[["column", "value", "prompts", "passes", "accepted"]].values.tolist() == [
        ["task", "chat", 1, 3, 2],
        ["task", "code", 2, 3, 7],
        ["language", "de", 1, 2, 4],
        ["language", "en", 2, 4, 5],
    ]
    assert table["micro"].tolist() == pytest.approx([2 / 3, 7 / 3, 2, 5 / 4])
    assert table["macro"].tolist() == pytest.approx([2 / 3, 5 / 2, 2, (2 / 3 + 3) / 2])
    # One prompt has no width; two have influences of 4/9 and 7/8, and Student's t is 12.706.
    assert table["low"].tolist() == pytest.approx([2 / 3, 0, 2, 0])
    high = [2 / 3, 7 / 3 + 12.706 * 4 / 9, 2, 5 / 4 + 12.706 * 7 / 8]
    assert table["high"].tolist() == pytest.approx(high, rel=1e-3)


def test_slice_has_the_numbers_of_its_own_summary() -> None:
    prompts = prompts_of(20)
    columns = pd.DataFrame({"half": ["x", "y"] * 10}, index=[prompt.sample_id for prompt in prompts])
    table = slice_acceptance(prompts, columns, ["half"]).set_index("value")
    for value, members in (("x", prompts[::2]), ("y", prompts[1::2])):
        expected = summarize_acceptance(members, QUICK)
        found = table.loc[value]
        assert (found["micro"], found["low"], found["high"]) == (expected.micro, expected.low, expected.high)


anything = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-50, 5000)), max_size=25),
    st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=25),
    st.lists(st.one_of(st.none(), st.booleans()), max_size=25),
    st.lists(st.one_of(st.none(), st.sampled_from(["code", "chat", "", "数学"])), max_size=25),
    st.lists(
        st.one_of(st.none(), st.integers(), st.text(max_size=2), st.lists(st.integers(), max_size=2)), max_size=25
    ),
)


@given(anything)
def test_slices_partition_the_prompts(values: list) -> None:
    table = by_one(values, dtype=object)
    total = summarize_acceptance(prompts_of(len(values)), QUICK)
    assert table[["prompts", "passes", "accepted"]].sum().tolist() == [total.prompts, total.passes, total.accepted]
    assert (table["prompts"] > 0).all()
    assert sizes(table).get(MISSING, 0) == pd.Series(values, dtype=object).isna().sum()


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60))
def test_numbers_are_cut_into_ranges_that_do_not_overlap(values: list[int]) -> None:
    table = by_one(values)
    ranges = [[int(end) for end in label.split("-")] for label in table["value"]]
    ends = [end for each in ranges for end in (each[0], each[-1])]
    assert ends == sorted(ends)
    assert len(ranges) == len({each[0] for each in ranges}) <= 4
    assert [sum(each[0] <= value <= each[-1] for value in values) for each in ranges] == table["prompts"].tolist()


def test_ranges_hold_about_as_many_prompts_each() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(40) ** 2).tolist()
    assert list(sizes(by_one(lengths)).values()) == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([64, 80, 128, 256, 300, 512, 1024, 2048], {"64-80": 2, "128-256": 2, "300-512": 2, "1024-2048": 2}),
        ([3, 1, 2, 1], {"1": 2, "2": 1, "3": 1}),
        ([7.0, None, 10.0, 7.0], {"7": 2, "10": 1, MISSING: 1}),
        ([-3, -2, -1, 0, 1, 2, 3, 4], {"-3 to -2": 2, "-1 to 0": 2, "1-2": 2, "3-4": 2}),
        ([0.123456789, 0.5], {"0.123457": 1, "0.5": 1}),
        ([True, None, False, True], {"False": 1, "True": 2, MISSING: 1}),
        (["en", None, "de", float("nan")], {"de": 1, "en": 1, MISSING: 2}),
        ([None, None], {MISSING: 2}),
    ],
)
def test_values_are_named_as_a_person_reads_them(values: list, expected: dict[str, int]) -> None:
    table = by_one(values)
    assert list(sizes(table).items()) == list(expected.items())


def test_numbers_beside_nulls_in_an_object_column_are_numbers() -> None:
    expected = {"5-7": 2, "9": 1, "100": 1, "1000": 1, MISSING: 1}
    found = sizes(by_one([100, None, 5, 7, 9, 1000], dtype=object))
    assert list(found.items()) == list(expected.items())


def test_prompts_that_the_columns_do_not_know_are_a_slice_of_their_own() -> None:
    columns = pd.DataFrame({"task": ["code", "chat"]}, index=["s01", "elsewhere"])
    assert sizes(slice_acceptance(prompts_of(3), columns, ["task"])) == {"code": 1, MISSING: 2}


def test_slice_without_a_pass_is_there_without_a_ratio() -> None:
    columns = pd.DataFrame({"task": ["code"]}, index=["empty"])
    table = slice_acceptance([PromptAcceptance.from_accepted_counts("empty", [], 0)], columns, ["task"])
    assert table[["prompts", "passes"]].values.tolist() == [[1, 0]]
    assert table[["micro", "macro", "low", "high"]].isna().all(axis=None)


def test_no_prompts_give_an_empty_table_of_the_same_shape() -> None:
    empty, full = by_one([]), by_one(["x"])
    assert empty.empty
    assert empty.dtypes.drop("value").drop("column").equals(full.dtypes.drop("value").drop("column"))


def test_unknown_column_is_refused_by_name() -> None:
    columns = pd.DataFrame({"task": ["code"], "language": ["en"]}, index=["s00"])
    with pytest.raises(DataError, match="slices by length: expected columns of the eval data, found task, language"):
        slice_acceptance(prompts_of(1), columns, ["task", "length"])


def test_columns_of_another_eval_set_are_refused() -> None:
    with pytest.raises(DataError, match="an index of sample ids such as s00, found none of the 2 prompts"):
        slice_acceptance(prompts_of(2), pd.DataFrame({"task": ["code", "chat"]}), ["task"])


def test_columns_that_know_a_sample_twice_are_refused() -> None:
    columns = pd.DataFrame({"task": ["code", "chat"]}, index=["s00", "s00"])
    with pytest.raises(DataError, match="each sample id once, found s00 more often"):
        slice_acceptance(prompts_of(1), columns, ["task"])


ABOUT = SlicePlan("toy", "eagle3", "heldout", "new", "old", 1.0, ())
PASSES = 20


def measure(
    means: dict[str, float], draft: str, seed: int, prompts: int = 30, first: int = 0, draft_tokens: int = 5
) -> MeasuredWalk:
    """A draft that accepts Poisson numbers of tokens of these means by language, on as many prompts of each."""
    rng = np.random.default_rng(seed)
    walk, tokens = [], []
    for language, mean in means.items():
        for number in range(first, first + prompts):
            total = int(rng.poisson(mean * PASSES))
            accepted = [total // PASSES + (place < total % PASSES) for place in range(PASSES)]
            name = f"{language}{number}"
            walk.append(PromptAcceptance.from_accepted_counts(name, accepted, total + PASSES))
            columns = {"language": language, "thinking": "on" if number % 2 else "off"}
            tokens.append(TokenRow(name, np.array([number], np.int32), np.ones(1, bool), columns))
    names = {"report": f"report {seed}", "draft": draft}
    return MeasuredWalk(tuple(walk), draft_tokens, Resampling(resamples=400), tokens=tokens, **names)


def by_value(changes) -> dict[str, str]:
    return {one.value: one.verdict for one in changes}


def test_the_slice_that_fell_is_named_with_its_figures_paired_where_prompts_are_shared():
    old = measure({"en": 2.0, "de": 2.0}, "a", 1)
    new = measure({"en": 2.0, "de": 1.4}, "b", 2)
    changes = compare_slices(new, old, ["language"])
    assert by_value(changes) == {"de": "fell", "en": "no clear change"}
    [fallen] = [one for one in changes if one.verdict == "fell"]
    assert (fallen.compared, fallen.prompts) == ("paired", 30)
    found = fallen.figures
    assert found.difference == pytest.approx(-0.6, abs=0.2)
    assert found.interval.low < found.difference < found.interval.high < 0
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
    again = replace(new, tokens=[replace(row, input_ids=row.input_ids + 1) for row in new.tokens])
    assert {one.compared for one in compare_slices(again, old, ["language"])} == {"unpaired"}


def test_slices_with_few_prompts_or_in_one_report_only_are_listed_and_not_judged():
    old = measure({"en": 2.0, "de": 2.0}, "a", 1, prompts=30)
    new = measure({"en": 0.1, "fr": 0.1}, "b", 2, prompts=19)
    changes = compare_slices(new, old, ["language"])
    assert by_value(changes) == dict.fromkeys(("de", "en", "fr"), "too few prompts")
    assert all(one.figures is None for one in changes)
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
