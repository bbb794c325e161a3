"""The benchmark of feature IO: every side is timed on the same bytes, and shares are medians of the turns' quotients."""

from __future__ import annotations

from pathlib import Path

from feature_io import TIMES, format_table, measure


def test_every_side_is_timed_and_leaves_nothing_behind(tmp_path: Path):
    found = measure(samples=2, tokens=8, hidden=16, folder=tmp_path)
    assert tuple(found) == TIMES
    assert all(rate > 0 for rates in found.values() for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_a_share_is_of_the_baseline_of_the_same_turn():
    turns = [{action: [10.0 ** (turn + at % 2), 1.0] for at, action in enumerate(TIMES)} for turn in range(3)]
    table = format_table("this", turns).splitlines()
    assert table[1] == "| plain write | 10.00 (1.00 to 100.00) | 1.00 (1.00 to 1.00) |"
    assert "| 10.00 (10.00 to 10.00) | 1.00 (1.00 to 1.00) |" in table[2]
