"""The file of a session on a GPU: a JSON line for each figure, written as soon as it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RowFile:
    """Rows of one card in a file that may have those of others too. A line is one write, so a kill leaves whole lines."""

    path: Path
    card: str

    def add(self, part: str, task: str, **values: Any) -> None:
        row = {"card": self.card, "part": part, "task": task, **values}
        with self.path.open("ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())
        print(json.dumps({name: value for name, value in row.items() if name not in ("card", "kernels")}), flush=True)

    def read(self, part: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield this card's rows; a line that is not whole is passed over."""
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["card"] == self.card and part in (None, row["part"]):
                yield row

    def keys(self, part: str, task: str) -> set[str]:
        """Return the keys of a task that have a figure."""
        return {row["key"] for row in self.read(part) if row["task"] == task and "key" in row and "problem" not in row}

    def ended(self, part: str, task: str) -> bool:
        """Whether a task ran to its end without a problem."""
        return any("ended" in row for row in self.read(part) if row["task"] == task)
