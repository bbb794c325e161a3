"""Watermarks: what they refuse, and how they count."""

from __future__ import annotations

import pytest

from draftworks.errors import ConfigError
from draftworks.stream.metadata_store import InFlight, Watermark


@pytest.mark.parametrize("limits", [{"samples": 0}, {"bytes": -1}, {"steps": 0}, {"samples": None}])
def test_limits_that_mean_nothing_are_refused(limits):
    with pytest.raises(ConfigError, match="watermark"):
        Watermark(**limits)


def test_the_default_is_256_samples():
    assert Watermark() == Watermark(samples=256, bytes=None, steps=None)


@pytest.mark.parametrize(
    ("watermark", "batch", "name"),
    [
        (Watermark(samples=7), InFlight(8), "samples"),
        (Watermark(bytes=99), InFlight(1, 100), "bytes"),
        (Watermark(steps=1), InFlight(1, 1, 2), "steps"),
    ],
)
def test_a_watermark_below_one_batch_is_refused(watermark, batch, name):
    with pytest.raises(ConfigError, match=rf"watermark.{name}: expected at least one global batch"):
        watermark.require_batch(batch)


def test_steps_are_turned_into_samples():
    assert Watermark(samples=None, steps=3).for_batches_of(8) == Watermark(samples=24)
    assert Watermark(samples=20, bytes=5, steps=3).for_batches_of(8) == Watermark(20, 5)
