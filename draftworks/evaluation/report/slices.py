"""Acceptance by task, language, length: by any column of the eval data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import DEFAULT_RESAMPLING, Resampling, summarize_acceptance

MISSING = "(none)"
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
    """One row per column and value, with the same measures as the summary; a column's slices partition the prompts.

    Numbers are cut at their quantiles, prompts without a value are a slice of their own. Small slices have intervals
    too, and those of very few prompts are too narrow: look at `prompts` beside them.

    Args:
        columns: what is known of the samples, indexed by sample id.
        by: which of its columns to slice by.

    Raises:
        DataError: a column is missing, or the index is not that of these prompts.
    """
    prompts = list(prompts)
    _check(prompts, columns, by)
    known = columns.reindex([prompt.sample_id for prompt in prompts])
    rows = []
    for column in by:
        for value, positions in _values(known[column]):
            measured = summarize_acceptance([prompts[position] for position in positions], resampling)
            rows.append({"column": column, "value": value, **{name: getattr(measured, name) for name in MEASURES}})
    return pd.DataFrame(rows, columns=["column", "value", *MEASURES]).astype(MEASURES)


def _check(prompts: Sequence[PromptAcceptance], columns: pd.DataFrame, by: Sequence[str]) -> None:
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


def _values(column: pd.Series) -> Iterator[tuple[str, np.ndarray]]:
    """Label and positions of each slice: numbers ascending, other values in alphabetical order, the missing ones last."""
    # Nulls turn whole numbers of a table into floats or objects; this gives them their kind back.
    column = column.convert_dtypes()
    missing = column.isna().to_numpy()
    there = np.flatnonzero(~missing)
    if is_numeric_dtype(column) and not is_bool_dtype(column):
        yield from _ranges(column.iloc[there].to_numpy(), there)
    else:
        labels = np.array([str(value) for value in column.iloc[there]], dtype=object)
        yield from ((label, there[labels == label]) for label in sorted(set(labels)))
    if missing.any():
        yield MISSING, np.flatnonzero(missing)


def _ranges(numbers: np.ndarray, positions: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Quantile bins, named by the least and the greatest number in them; equal numbers share a bin."""
    edges = np.unique(numbers)
    if len(edges) > BINS:
        edges = np.unique(np.quantile(numbers, np.arange(1, BINS) / BINS, method="inverted_cdf"))
    bins = np.searchsorted(edges, numbers)
    for each in np.unique(bins):
        inside = bins == each
        yield _range_label(numbers[inside].min(), numbers[inside].max()), positions[inside]


def _range_label(low: float, high: float) -> str:
    if low == high:
        return _number(low)
    return f"{_number(low)}{' to ' if low < 0 else '-'}{_number(high)}"


def _number(value: float) -> str:
    return str(int(value)) if np.isfinite(value) and value == int(value) else f"{value:.6g}"
