"""Acceptance by slices of the eval data: by task, language, length or any other column, and by the place in the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from draftworks.data.slices import LENGTH
from draftworks.data.tokenized import TokenizedSet
from draftworks.errors import DataError
from draftworks.evaluation.ladder.positions import PromptsByPosition, describe_range
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import DEFAULT_RESAMPLING, Resampling, summarize_acceptance

MISSING = "(none)"
POSITION = "position"
"""Name of the slices by place in the text. They partition the passes: a long answer is in several of them."""
BINS = 4
MEASURES = {
    "prompts": "int64",
    "passes": "int64",
    "accepted": "int64",
    "micro": "float64",
    "macro": "float64",
    "low": "float64",
    "high": "float64",
}


def slice_acceptance(
    prompts: Iterable[PromptAcceptance],
    columns: pd.DataFrame,
    by: Sequence[str],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> pd.DataFrame:
    """Return the acceptance of every slice: a row per column and value. The slices of a column partition the prompts.

    Numbers are binned at their quantiles; prompts without a value are a slice. Intervals of slices with very few
    prompts are too narrow, so `prompts` stands in every row.

    Args:
        columns: columns of the samples, indexed by sample id.
        by: names of the columns to slice by.

    Raises:
        DataError: a column is missing, or the index is not that of these prompts.
    """
    return measure_slices(iterate_slices(prompts, columns, by), resampling)


def measure_slices(slices: Iterable[Slice], resampling: Resampling = DEFAULT_RESAMPLING) -> pd.DataFrame:
    """Return the acceptance of each slice, a row for each; the columns of `slice_acceptance`."""
    rows = []
    for each in slices:
        measured = summarize_acceptance(each.prompts, resampling)
        rows.append(
            {"column": each.column, "value": each.value, **{name: getattr(measured, name) for name in MEASURES}}
        )
    return pd.DataFrame(rows, columns=["column", "value", *MEASURES]).astype(MEASURES)


class Slice(NamedTuple):
    """The prompts with one value, or a range of values, of a column."""

    column: str
    value: str
    prompts: list[PromptAcceptance]


def iterate_slices(prompts: Iterable[PromptAcceptance], columns: pd.DataFrame, by: Sequence[str]) -> Iterator[Slice]:
    """Yield every slice; see `slice_acceptance`."""
    prompts = list(prompts)
    _check_columns(prompts, columns, by)
    known = columns.reindex([prompt.sample_id for prompt in prompts])
    for column in by:
        for value, positions in _slice_column(known.loc[:, column]):
            yield Slice(column, value, [prompts[position] for position in positions])


def iterate_positions(walk: PromptsByPosition) -> Iterator[Slice]:
    """Yield a slice for every range of places in the text, ascending, with the passes of each prompt there alone."""
    for begin, prompts in walk.items():
        yield Slice(POSITION, describe_range(begin), list(prompts))


def read_sample_columns(tokens: TokenizedSet) -> pd.DataFrame:
    """Return the columns of the eval data, and `length` in tokens, indexed by sample id."""
    rows = [{**row.columns, "sample_id": row.sample_id, LENGTH: len(row)} for row in tokens]
    return pd.DataFrame(rows).set_index("sample_id")


def _check_columns(prompts: Sequence[PromptAcceptance], columns: pd.DataFrame, by: Sequence[str]) -> None:
    absent = [column for column in by if column not in columns]
    if absent:
        raise DataError(
            f"slices by {', '.join(absent)}: expected columns of the eval data, found {', '.join(map(str, columns))}"
        )
    if not columns.index.is_unique:
        twice = columns.index[columns.index.duplicated()][0]
        raise DataError(f"columns of the eval data: expected each sample id once, found {twice} more often")
    if prompts and not any(prompt.sample_id in columns.index for prompt in prompts):
        raise DataError(
            f"columns of the eval data: expected an index of sample ids such as {prompts[0].sample_id},"
            f" found none of the {len(prompts)} prompts in it: give the columns of the eval set that was evaluated"
        )


def _slice_column(column: pd.Series) -> Iterator[tuple[str, np.ndarray]]:
    """Yield label and row numbers of each slice: numbers ascending, other values alphabetically, missing ones last."""
    # Nulls turn a column of integers into floats or objects; this restores its type.
    column = column.convert_dtypes()
    missing = column.isna().to_numpy()
    there = np.flatnonzero(~missing)
    if is_numeric_dtype(column) and not is_bool_dtype(column):
        yield from _bin_numbers(column.iloc[there].to_numpy(), there)
    else:
        labels = np.array([str(value) for value in column.iloc[there]], dtype=object)
        yield from ((label, there[labels == label]) for label in sorted(set(labels)))
    if missing.any():
        yield MISSING, np.flatnonzero(missing)


def _bin_numbers(numbers: np.ndarray, positions: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield quantile bins, labelled with the smallest and the largest number in them; equal numbers share a bin."""
    edges = np.unique(numbers)
    if len(edges) > BINS:
        edges = np.unique(np.quantile(numbers, np.arange(1, BINS) / BINS, method="inverted_cdf"))
    bins = np.searchsorted(edges, numbers)
    for each in np.unique(bins):
        inside = bins == each
        yield _format_range(numbers[inside].min(), numbers[inside].max()), positions[inside]


def _format_range(low: float, high: float) -> str:
    if low == high:
        return _format_number(low)
    return f"{_format_number(low)}{' to ' if low < 0 else '-'}{_format_number(high)}"


def _format_number(value: float) -> str:
    return str(int(value)) if np.isfinite(value) and value == int(value) else f"{value:.6g}"
