"""Progress: the remaining time and its format."""

from __future__ import annotations

from draftworks.capture.batch_notes import Progress


def test_rest_takes_as_long_as_its_share_says():
    at = Progress("samples", done=3, total=12, share=0.25, tokens=100, seconds=10.0)
    assert at.eta_s == 30
    assert at.summarize() == {"samples": "3/12", "tokens/s": 10, "eta": "30s"}


def test_long_waits_are_told_in_their_largest_units():
    seconds = (59.4, 60, 3599, 3600, 86399, 90000, 180000)
    etas = [Progress("samples", 1, 2, 0.5, 0, each).summarize()["eta"] for each in seconds]
    assert etas == ["59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d01h", "2d02h"]


def test_nothing_is_promised_before_anything_is_done():
    assert Progress("samples", done=0, total=12, share=0.0, tokens=0, seconds=0.0).summarize()["eta"] == "?"
