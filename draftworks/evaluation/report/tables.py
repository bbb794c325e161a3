"""Parquet tables of a report, for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.figures import WALK_AT, Figure, list_counted_rungs, list_position_rungs
from draftworks.storage.files import publish_file

if TYPE_CHECKING:
    import pandas as pd

    from draftworks.evaluation.ladder.measurement import DraftMeasurement  # it imports torch

MAX_SLICES_PER_COLUMN = 12
COUNTED = ("low", "high", "confidence", "prompts", "passes", "tokens_per_pass")
SUMMARY_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("target", "strategy", "eval_set", "draft")),
        ("rung", pa.int64()),
        ("metric", pa.string()),
        ("temperature", pa.float64()),
        *((name, pa.string()) for name in ("rule", "servers")),
        ("top_k", pa.int64()),
        ("top_p", pa.float64()),
        *((name, pa.float64()) for name in ("value", "low", "high", "confidence")),
        *((name, pa.int64()) for name in ("prompts", "passes")),
        *((name, pa.float64()) for name in ("tokens_per_pass", "speed_up")),
    ]
)
PROMPTS_SCHEMA = pa.schema(
    [
        ("draft", pa.string()),
        ("rung", pa.int64()),
        *((name, pa.string()) for name in ("metric", "sample_id")),
        *((name, pa.int64()) for name in ("passes", "accepted", "emitted")),
        ("histogram", pa.list_(pa.int64())),
    ]
)
SLICES_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("column", "value")),
        *((name, pa.int64()) for name in ("prompts", "passes", "accepted")),
        *((name, pa.float64()) for name in ("micro", "macro", "low", "high")),
        ("rival", pa.string()),
        *((name, pa.float64()) for name in ("rival_micro", "difference", "difference_low", "difference_high")),
    ]
)
DIFFERENCES_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("draft", "sample_id", "whose")),
        *((name, pa.int64()) for name in ("position", "walk", "loop", "pass_number", "place")),
        ("gap", pa.float64()),
    ]
)

PromptsByRung: TypeAlias = dict[tuple[str, str], tuple[PromptAcceptance, ...]]


def build_summary_table(heading: Mapping[str, str], figures: Iterable[Figure]) -> pa.Table:
    """Build the table of all numbers; `heading` has the columns target, strategy and eval set."""
    return pa.Table.from_pylist([{**heading, **_summary_row(found)} for found in figures], SUMMARY_SCHEMA)


def build_prompts_table(drafts: Mapping[str, DraftMeasurement]) -> pa.Table:
    """Build the table of acceptance counts per draft, rung and prompt, by which two drafts can be compared later.

    A prompt's walk has further rows, one for each range of places in the text that it has a pass in.
    """
    rows = [
        {"draft": name, "rung": rung.rung, "metric": rung.metric, **vars(prompt)}
        for name, measured in drafts.items()
        for rung in [*list_counted_rungs(measured), *list_position_rungs(measured)]
        for prompt in rung.prompts
    ]
    return pa.Table.from_pylist(rows, PROMPTS_SCHEMA)


def build_slices_table(slices: pd.DataFrame) -> pa.Table:
    """Build the table of slices; its types are fixed, also without a row."""
    return pa.Table.from_pandas(slices, SLICES_SCHEMA, preserve_index=False)


def build_differences_table(drafts: Mapping[str, DraftMeasurement]) -> pa.Table:
    """Build the table of prompts on which loop and walk differ; columns as in `Difference`."""
    rows = [
        {"draft": name, **vars(difference)}
        for name, measured in drafts.items()
        for loop in measured.loops
        for difference in loop.differences or ()
    ]
    return pa.Table.from_pylist(rows, DIFFERENCES_SCHEMA)


class ShownSlices(NamedTuple):
    """Slices that a page shows: those of columns with more than one; of a column with many, the largest.

    `left_out`: how many more a column has, which are in the file only.
    """

    slices: pd.DataFrame
    left_out: dict[str, int]


def select_slices_to_show(slices: pd.DataFrame) -> ShownSlices:
    """Return the slices for a page, and how many of each column it leaves out."""
    sizes = Counter(slices["column"])
    several = slices.loc[[sizes[column] > 1 for column in slices["column"]]]
    by_size = several.sort_values(by="prompts", ascending=False, kind="stable")
    largest = by_size.groupby("column").head(MAX_SLICES_PER_COLUMN)
    left_out = {column: size - MAX_SLICES_PER_COLUMN for column, size in sizes.items() if size > MAX_SLICES_PER_COLUMN}
    return ShownSlices(several.loc[sorted(largest.index)], left_out)


def read_prompts(path: Path) -> PromptsByRung:
    """Read prompts.parquet, by draft and metric, in the order of the file."""
    found: dict[tuple[str, str], list[PromptAcceptance]] = {}
    for row in pq.read_table(path, schema=PROMPTS_SCHEMA).to_pylist():
        prompt = PromptAcceptance(
            row["sample_id"], row["passes"], row["accepted"], row["emitted"], tuple(row["histogram"])
        )
        found.setdefault((row["draft"], row["metric"]), []).append(prompt)
    return {name: tuple(prompts) for name, prompts in found.items()}


def select_walk_by_position(prompts: PromptsByRung, draft: str) -> dict[int, tuple[PromptAcceptance, ...]]:
    """Return the walk of a draft in every range of places, by the begin of the range, ascending."""
    found = {
        int(metric.removeprefix(WALK_AT)): rows
        for (name, metric), rows in prompts.items()
        if name == draft and metric.startswith(WALK_AT)
    }
    return dict(sorted(found.items()))


def publish_table(path: Path, table: pa.Table) -> None:
    with publish_file(path) as staging:
        pq.write_table(table, staging)


def _summary_row(found: Figure) -> dict[str, Any]:
    counted = {} if found.acceptance is None else {name: getattr(found.acceptance, name) for name in COUNTED}
    decoded = {} if found.decoding is None else {"top_p": 1.0, **found.decoding.to_json()}
    names = ("draft", "rung", "metric", "value", "speed_up")
    servers = {"servers": found.servers or None}
    return {**{name: getattr(found, name) for name in names}, **decoded, **servers, **counted}
