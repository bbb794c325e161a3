"""Geometry of the page's charts, in units of the SVG's view box. What is drawn, and escaped, is in the template."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from draftworks.evaluation.acceptance_length import count_own_token, format_interval, format_length

WIDTH = 640.0
_LABELS = 230.0
"""Width of the names at the left of a chart of intervals."""
_ROW, _EDGE = 22.0, 24.0
_LINES_HEIGHT, _LEFT = 190.0, 46.0
_MOST_POINTS = 240
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Measured:
    """Accepted tokens per pass under a name, with an interval and what the best rival for nothing accepts, if known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    rival: float | None = None

    def describe(self) -> str:
        """Return the value as an acceptance length, with its interval."""
        if self.low is None or self.high is None:
            return format_length(self.value)
        return f"{format_length(self.value)} ({format_interval(self.low, self.high)})"


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and its number."""

    at: float
    text: str


@dataclass(frozen=True)
class IntervalRow:
    """A row of a chart of intervals: places of the value, of its interval and of the rival."""

    name: str
    said: str
    y: float
    at: float
    low: float | None
    high: float | None
    rival: float | None


@dataclass(frozen=True)
class IntervalChart:
    """Rows of acceptance lengths with intervals over one axis."""

    height: float
    rows: tuple[IntervalRow, ...]
    ticks: tuple[Tick, ...]
    width: float = WIDTH
    labels: float = _LABELS


@dataclass(frozen=True)
class Line:
    """A named line through points of (x, y), in the values' own units."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class DrawnLine:
    """A line as points of SVG's `points`, each also by itself."""

    name: str
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x, with ticks of both axes."""

    title: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: float = WIDTH
    height: float = _LINES_HEIGHT
    left: float = _LEFT


def draw_intervals(rows: Sequence[Measured]) -> IntervalChart | None:
    """Return a chart with a row for each; None without a row."""
    if not rows:
        return None
    ends = [end for row in rows for end in (row.value, row.low, row.high, row.rival) if end is not None]
    marks = [count_own_token(mark) for mark in _choose_ticks(0.0, max(*ends, 0.5))]
    scale = (WIDTH - _LABELS - _EDGE) / (marks[-1] - marks[0])

    def place(accepted: float | None) -> float | None:
        return None if accepted is None else _LABELS + (max(count_own_token(accepted), marks[0]) - marks[0]) * scale

    drawn = tuple(
        IntervalRow(
            row.name,
            row.describe() + ("" if row.rival is None else f"; for nothing {format_length(row.rival)}"),
            _ROW * (number + 0.5),
            place(row.value) or 0.0,
            place(row.low),
            place(row.high),
            place(row.rival),
        )
        for number, row in enumerate(rows)
    )
    ticks = tuple(Tick(_LABELS + (mark - marks[0]) * scale, f"{mark:g}") for mark in marks)
    return IntervalChart(_ROW * len(rows) + _EDGE, drawn, ticks)


def draw_lines(title: str, lines: Iterable[Line], over_time: bool = False, from_one: bool = False) -> LineChart | None:
    """Return a chart of lines; None where none has a point that is a finite number.

    Args:
        over_time: x are seconds since the epoch, and are shown as dates.
        from_one: the y axis begins at 1, as acceptance lengths do.
    """
    kept = {line.name: [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)] for line in lines}
    kept = {name: _thin(points) for name, points in kept.items() if points}
    if not kept:
        return None
    xs, ys = zip(*(point for points in kept.values() for point in points))
    if from_one:
        y_marks = [count_own_token(mark) for mark in _choose_ticks(0.0, max(0.5, max(ys) - count_own_token(0.0)))]
    else:
        y_marks = _choose_ticks(min(ys), max(ys))
    x_marks = [min(xs), max(xs)] if over_time else _choose_ticks(min(xs), max(xs))
    x_scale = (WIDTH - _LEFT - _EDGE) / ((x_marks[-1] - x_marks[0]) or 1.0)
    y_scale = (_LINES_HEIGHT - 2 * _EDGE) / ((y_marks[-1] - y_marks[0]) or 1.0)

    def place_x(x: float) -> float:
        return round(_LEFT + (x - x_marks[0]) * x_scale, 1)

    def place_y(y: float) -> float:
        return round(_LINES_HEIGHT - _EDGE - (y - y_marks[0]) * y_scale, 1)

    def draw(name: str, points: Sequence[tuple[float, float]]) -> DrawnLine:
        dots = tuple((place_x(x), place_y(y)) for x, y in points)
        return DrawnLine(name, " ".join(f"{x:g},{y:g}" for x, y in dots), dots if len(dots) <= 40 else ())

    return LineChart(
        title,
        tuple(draw(name, points) for name, points in kept.items()),
        tuple(Tick(place_x(mark), _format_x(mark, over_time)) for mark in dict.fromkeys(x_marks)),
        tuple(Tick(place_y(mark), f"{mark:g}") for mark in y_marks),
    )


def _format_x(value: float, over_time: bool) -> str:
    return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d}" if over_time else f"{value:,g}"


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `_MOST_POINTS` points at equal steps, the last one always."""
    step = -(-len(points) // _MOST_POINTS)
    return list(points[:-1:step]) + [points[-1]]


def _choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers, at most `most` + 1, of which the first is `low` or less and the last `high` or more."""
    span = (high - low) or abs(low) or 1.0
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in _STEPS if each * power >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]
