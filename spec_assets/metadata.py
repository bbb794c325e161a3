"""Small helpers that turn figures and files into what the Dagster UI shows."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.artifacts import Artifact


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


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dg.MarkdownMetadataValue:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return dg.MetadataValue.md("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


def picture(path: Path, title: str) -> dg.MarkdownMetadataValue:
    """A PNG file as Markdown that the UI renders in place."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{encoded})")
