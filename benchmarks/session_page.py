"""Tables in Markdown of the rows of a session on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS: Mapping[str, Sequence[str]] = {
    "ceilings": ("key", "ms", "tflops", "tb_per_s"),
    "strategies": ("task", "step_ms", "tokens_per_s", "samples_per_s", "peak_gb", "mfu"),
    "peers": ("task", "key", "ms", "samples_per_s", "peak_gb"),
    "kernels": ("task", "step_ms", "launches", "busy_ms", "idle_share"),
    "capture": ("key", "ms", "tokens_per_s"),
    "verify": ("batch", "new", "context", "layer_ms", "layer_graph_ms", "head_ms", "head_graph_ms"),
}
MOST_KERNELS = 10


def make_page(file: Path) -> str:
    """Return a table of each card and part; of what was measured twice, the last. Problems are below their table."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    lines = []
    for card in dict.fromkeys(row["card"] for row in rows):
        lines += [f"## {card}", ""]
        ours = [row for row in rows if row["card"] == card]
        for part in dict.fromkeys(row["part"] for row in ours):
            lines += describe_part(part, [row for row in ours if row["part"] == part])
    return "\n".join(lines)


def describe_part(part: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = {(row["task"], row["key"]): row for row in rows if "key" in row}
    lines = [f"### {part}", ""]
    if part in COLUMNS:
        columns = COLUMNS[part]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(show(row.get(name)) for name in columns)} |" for row in found.values()]
    else:
        outcomes = [row["outcome"] for row in found.values()]
        lines.append(", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes))))
    for row in found.values():
        if "kernels" in row:
            lines += ["", f"| {row['task']} | calls | ms |", "|---|---|---|"]
            lines += [
                f"| `{each['name'][:90]}` | {each['calls']} | {show(each['ms'])} |"
                for each in row["kernels"][:MOST_KERNELS]
            ]
    ended = {row["task"] for row in rows if "ended" in row}
    problems = [row for row in rows if "problem" in row and (row.get("key", row["task"]) not in ended)]
    lines += ["", *(f"* {row.get('key', row['task'])}: {row['problem']}" for row in problems), ""]
    return lines


def show(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
