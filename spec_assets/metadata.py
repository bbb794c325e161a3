"""Figures, tables, pictures and paths as metadata for the Dagster UI."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.evaluation.acceptance_length import SYMBOL, count_own_token, format_length
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.strategy_metrics import list_sampled_acceptance
from draftworks.storage.artifacts import Artifact

DIGITS = 4
"""Significant digits of a float in metadata. Identifiers are text and are not rounded."""
MOST_REASONS = 5
SIMULATED, WALK, LOOP = "eval/simulated_acc_len", "eval/rung3_walk_acc_len", "eval/rung4_loop_t0_acc_len"


def round_figures(value: Any) -> Any:
    """Round floats to DIGITS significant digits, also inside lists, mappings and Dagster's metadata values."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else float(round(value))
    if isinstance(value, dg.FloatMetadataValue):
        return dg.MetadataValue.float(round_figures(value.value))
    if isinstance(value, dg.JsonMetadataValue):
        return dg.MetadataValue.json(round_figures(value.data))
    if isinstance(value, Mapping):
        return {key: round_figures(each) for key, each in value.items()}
    return [round_figures(each) for each in value] if isinstance(value, list) else value


def shorten_path(artifact: Artifact, *below: str) -> dg.PathMetadataValue:
    """Return the path of a result, or of something in it, relative to the folder of all results."""
    return dg.MetadataValue.path(artifact.path.relative_to(artifact.path.parents[3]).joinpath(*below))


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit: 1536 gives '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def select_figures(artifact: Artifact) -> dict[str, Any]:
    """Return the scalar entries of a result's summary, without digests and schema numbers."""
    hidden = {"schema", "digest", "file_digest"}
    return {k: v for k, v in artifact.summary.items() if k not in hidden and isinstance(v, (str, int, float))}


def select_acceptance(metrics: Mapping[str, Any], suffix: str = "") -> dict[str, float]:
    """Return the acceptance length of each rung that was measured, the walk first; Dagster plots such floats over time."""
    rungs = {"walk": WALK, "simulated": SIMULATED, "loop": LOOP}
    measured = {name: metrics[key] for name, key in rungs.items() if metrics.get(key) is not None}
    return {f"{name}_acceptance_length{suffix}": count_own_token(value) for name, value in measured.items()}


def tabulate_sampled(strategy: str, metrics: Mapping[str, Any], suffix: str = "") -> dict[str, Any]:
    """Return a table of acceptance above temperature 0 by rule, with the servers that it is of; {} where none was measured."""
    columns = ("decoding", "rule", "servers", f"{SYMBOL} simulated", f"{SYMBOL} loop")
    rows = [
        (
            one.decoding.describe(),
            one.decoding.rule,
            one.servers,
            format_length(one.simulated, 3, none=""),
            format_length(one.loop, 3, none=""),
        )
        for one in list_sampled_acceptance(strategy, metrics)
    ]
    return {f"sampled_acceptance{suffix}": format_table(columns, rows)} if rows else {}


def describe_rejections(artifact: Artifact) -> dict[str, Any]:
    """Return a table of the reasons for which rows or conversations were rejected, each with its first case; {} if
    none was."""
    from draftworks.data.conversations import QUARANTINE_FILE

    path = artifact.path / QUARANTINE_FILE
    counts: Counter[str] = Counter()
    first: dict[str, dict[str, Any]] = {}
    with path.open(encoding="utf-8") if path.is_file() else open(os.devnull) as lines:
        for entry in map(json.loads, lines):
            counts[entry["reason"]] += 1
            first.setdefault(entry["reason"], entry)
    if not counts:
        return {}
    rows = [(reason, count, *_format_case(first[reason])) for reason, count in counts.most_common()]
    return {"rejected_because": format_table(("reason", "count", "first", "it begins"), rows, MOST_REASONS)}


def describe_lineage(artifact: Artifact) -> dict[str, Any]:
    """Return where served prompts come from, and how a mix is made up; {} for other data. No text of a row is in it."""
    found = {name: artifact.summary[name] for name in ("lineage", "mix") if name in artifact.summary}
    return {name: dg.MetadataValue.json(value) for name, value in found.items()}


def describe_slices(artifact: Artifact, name: str) -> dict[str, Any]:
    """Return a table of what the slices of a mix's shares contributed, an entry of the summary; {} without it."""
    found = artifact.summary.get(name)
    if not found:
        return {}
    columns = ("slice", *next(iter(found.values())))
    return {name: format_table(columns, [(value, *map(str, counts.values())) for value, counts in found.items()])}


def _format_case(entry: Mapping[str, Any]) -> tuple[str, str]:
    where = f"{Path(entry['file']).name}:{entry['line']}" if "file" in entry else entry["sample_id"]
    return where, entry.get("excerpt", "")


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], most: int | None = None
) -> dg.MarkdownMetadataValue:
    """Return a Markdown table of at most so many rows, which says how many more there are."""
    known = list(rows)
    table = render_table([dict(zip(columns, row)) for row in known[:most]], columns)
    more = 0 if most is None else len(known) - most
    return dg.MetadataValue.md(f"{table}\n\nand {more:,} more" if more > 0 else table)


def embed_picture(path: Path, title: str) -> dg.MarkdownMetadataValue:
    """Return a PNG file as Markdown with the image inside."""
    return embed_png(path.read_bytes(), title)


def embed_png(content: bytes, title: str) -> dg.MarkdownMetadataValue:
    """Return the bytes of a PNG file as Markdown with the image inside."""
    encoded = base64.b64encode(content).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{encoded})")
