"""The benchmark of feature IO: every side is timed on the same bytes, and shares are medians of the turns' quotients."""

from __future__ import annotations

from pathlib import Path

from feature_io import TIMES, format_turns, list_aims, measure


def test_every_side_is_timed_and_leaves_nothing_behind(tmp_path: Path):
    found = measure(samples=2, tokens=8, hidden=16, folder=tmp_path)
    assert tuple(found) == TIMES
    assert all(rate > 0 for rates in found.values() for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_a_share_is_of_the_baseline_of_the_same_turn():
    turns = [{action: [10.0 ** (turn + at % 2), 1.0] for at, action in enumerate(TIMES)} for turn in range(3)]
    table = format_turns("this", turns).splitlines()
    assert table[2] == "| plain write | 10.00 (1.00 to 100.00) | 1.00 (1.00 to 1.00) |  |  |"
    assert "| 10.00 (10.00 to 10.00) | 1.00 (1.00 to 1.00) |" in table[3]


def test_a_read_that_is_slow_has_to_be_near_its_baseline():
    turn = dict.fromkeys(TIMES, [3.0, 1.0])
    assert [aim.reached for aim in list_aims([turn])] == [True, True, True]
    assert [aim.reached for aim in list_aims([{**turn, "copy + hash": [4.0, 1.0]}])] == [True, False, True]
    assert [aim.reached for aim in list_aims([{**turn, "first read": [4.0, 1.0], "copy + hash": [9.0, 1.0]}])][1]
