"""What benchmarks print: Markdown tables of medians with their ranges, and which aims were reached.

`benchmarks/page.py` puts what a benchmark printed into docs/benchmarks.md as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MISSED = "Not reached: "


@dataclass(frozen=True)
class Aim:
    """A figure and the least it should be; with `at_most`, the most.

    Attributes:
        what: the figure in words, as it may stand without its table.
    """

    what: str
    found: float
    aim: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.found <= self.aim if self.at_most else self.found >= self.aim

    def __str__(self) -> str:
        start = "Reached: " if self.reached else MISSED
        return f"{start}{self.what}: {self.found:.3g} (aim: at {'most' if self.at_most else 'least'} {self.aim:g})."


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summarize(values: Sequence[float], digits: int = 0) -> str:
    """Return the median and the range, such as `12 (10 to 15)`."""
    median, low, high = (f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


def print_aims(aims: Sequence[Aim]) -> None:
    """Print the aims as a Markdown list, after an empty line."""
    print("", *(f"* {aim}" for aim in aims), sep="\n")
