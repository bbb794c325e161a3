"""Slices partition the prompts, and their labels tell what is in them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling, summarize_acceptance
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
