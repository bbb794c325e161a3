"""Small helpers that turn figures and files into what the Dagster UI shows."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.evaluation.report.markdown_tables import render_table
from draftworks.storage.artifacts import Artifact

DIGITS = 4
"""Of a figure: more than anything here is measured with. What identifies something is text, and kept whole."""
MOST_REASONS = 5
SIMULATED, WALK, LOOP = "eval/simulated_acc_len", "eval/rung3_walk_acc_len", "eval/rung4_loop_t0_acc_len"


def legible(value: Any) -> Any:
    """A figure with the digits it deserves, also inside of lists, mappings and Dagster's own values; anything else as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else float(round(value))
    if isinstance(value, dg.FloatMetadataValue):
        return dg.MetadataValue.float(legible(value.value))
    if isinstance(value, dg.JsonMetadataValue):
        return dg.MetadataValue.json(legible(value.data))
    if isinstance(value, Mapping):
        return {key: legible(each) for key, each in value.items()}
    return [legible(each) for each in value] if isinstance(value, list) else value


def short_path(artifact: Artifact, *below: str) -> dg.PathMetadataValue:
    """Where a result, or something in it, lies: from the folder of all results on, since a whole path fills the page."""
    return dg.MetadataValue.path(artifact.path.relative_to(artifact.path.parents[3]).joinpath(*below))


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def summary_figures(artifact: Artifact) -> dict[str, Any]:
    """The scalar figures of a result's summary; digests and schema numbers are for machines."""
    hidden = {"schema", "digest", "file_digest"}
    return {k: v for k, v in artifact.summary.items() if k not in hidden and isinstance(v, (str, int, float))}


def acceptance_figures(metrics: Mapping[str, Any], suffix: str = "") -> dict[str, float]:
    """Accepted draft tokens per pass by rung, those that were measured, as plain figures: Dagster draws these over time."""
    rungs = {"simulated_acc_len": SIMULATED, "walk_acc_len": WALK, "loop_acc_len": LOOP}
    return {f"{name}{suffix}": metrics[key] for name, key in rungs.items() if metrics.get(key) is not None}


def rejections(artifact: Artifact) -> dict[str, Any]:
    """Why rows or conversations were rejected, most frequent reasons first, each with its first case; nothing if none was."""
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
    rows = [(reason, count, *_case(first[reason])) for reason, count in counts.most_common(MOST_REASONS)]
    return {"rejected_because": table(("reason", "count", "first", "it begins"), rows)}


def _case(entry: Mapping[str, Any]) -> tuple[str, str]:
    where = f"{Path(entry['file']).name}:{entry['line']}" if "file" in entry else entry["sample_id"]
    return where, entry.get("excerpt", "")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dg.MarkdownMetadataValue:
    """A Markdown table."""
    return dg.MetadataValue.md(render_table([dict(zip(columns, row)) for row in rows], columns))


def picture(path: Path, title: str) -> dg.MarkdownMetadataValue:
    """A PNG file as Markdown that the UI renders in place."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{encoded})")
