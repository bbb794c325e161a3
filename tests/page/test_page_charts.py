"""Whatever is measured is drawn inside the picture, over an axis that holds it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from draftworks.page.charts import WIDTH, Line, Measured, draw_intervals, draw_lines

ACCEPTED = st.floats(0, 60, allow_subnormal=False)
ANY = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf])


@given(st.lists(st.tuples(ACCEPTED, ACCEPTED, ACCEPTED, st.none() | ACCEPTED), max_size=5))
def test_every_interval_is_inside_its_axis(rows: list[tuple[float, float, float, float | None]]):
    measured = [Measured("x", sorted(row[:3])[1], min(row[:3]), max(row[:3]), row[3]) for row in rows]
    chart = draw_intervals(measured)
    if chart is None:
        assert not rows
        return
    first, last = chart.ticks[0], chart.ticks[-1]
    assert first.text == "1"
    for row in chart.rows:
        places = [each for each in (row.low, row.at, row.high, row.rival) if each is not None]
        assert all(first.at - 1e-6 <= place <= last.at + 1e-6 for place in places)
        assert row.low is not None
        assert row.high is not None
        assert row.low <= row.at + 1e-6 <= row.high + 2e-6
        assert 0 < row.y < chart.height
    assert last.at <= WIDTH


@given(st.lists(st.tuples(ANY, ANY), max_size=400))
def test_every_finite_point_is_inside_the_picture_and_others_are_left_out(points: list[tuple[float, float]]):
    chart = draw_lines("x", [Line("x", points)])
    finite = [point for point in points if all(map(math.isfinite, point))]
    assert (chart is None) == (not finite)
    if chart is None:
        return
    drawn = [tuple(map(float, pair.split(","))) for pair in chart.lines[0].path.split()]
    assert 0 < len(drawn) <= min(len(finite), 241)
    assert all(0 <= x <= chart.width and 0 <= y <= chart.height for x, y in drawn)


def test_places_follow_from_values():
    chart = draw_lines("x", [Line("x", [(0, 1.0), (100, 2.0)])], from_one=True)
    assert chart is not None
    assert [tick.text for tick in chart.y_ticks] == ["1", "1.2", "1.4", "1.6", "1.8", "2"]
    assert chart.lines[0].path == "46,166 616,24"
    assert [tick.text for tick in chart.x_ticks][::5] == ["0", "100"]
