"""The time left follows what is left to read and to generate, not how many conversations are done."""

from __future__ import annotations

import random

import pytest

from draftworks.capture.answers.remaining import Cost, RemainingTime


def test_reading_and_generating_are_reckoned_apart():
    """Of two conversations one is done: 100 tokens read in 1 s, 50 generated in 5 s, cut by the limit."""
    left = RemainingTime(limit=50)
    left.expect("a", Cost(100, 1))
    left.expect("b", Cost(400, 1))
    assert left.estimate() is None
    left.spend(100, 1, 1.0)
    left.spend(0, 49, 4.9)
    left.end("a", 50, answers=1, cut=1)
    assert left.estimate() == pytest.approx(4.0 + 50 * 4.9 / 50)


def test_later_turns_read_what_was_said_before():
    left = RemainingTime(limit=10)
    left.expect("a", Cost(100, 3))
    left.spend(100, 1, 1.0)
    left.spend(0, 9, 9.0)
    assert left.estimate() == pytest.approx(9 / 10 * 20 + (500 + 3 * 10) / 100)


@pytest.mark.parametrize("mean", [20, 60, 500])
def test_the_length_of_answers_is_known_before_the_long_ones_have_ended(mean: int):
    """Sixteen answers run at a time and only ended ones are seen to end; a tenth of the way on the mean is within 1.3."""
    draw, limit = random.Random(mean), 128
    lengths = [min(limit, 1 + int(draw.expovariate(1 / mean))) for _ in range(400)]
    left, waiting, running = RemainingTime(limit), list(enumerate(lengths)), []
    while left.made < sum(lengths) / 10:
        while len(running) < 16:
            number, length = waiting.pop()
            running.append([number, length, length])
        left.spend(0, len(running), 1.0)
        for each in running:
            each[1] -= 1
        for number, _, length in [each for each in running if not each[1]]:
            left.end(str(number), length, answers=1, cut=int(length == limit))
        running = [each for each in running if each[1]]
    assert left.expected_length == pytest.approx(sum(lengths) / len(lengths), rel=0.3)
