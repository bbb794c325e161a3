"""The forecasts of docs/scaling.md: its tables are the script's, more GPUs are never slower, measured runs are predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scaling_model import Plant, simulate
from scaling_points import POINTS, Costs
from scaling_s3_points import POINTS as S3_POINTS
from scaling_simulation import CONVERSATIONS, DEFAULTS, GPUS, Rates, forecast, format_tables, main

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()


def test_the_tables_of_the_document_are_those_of_the_script() -> None:
    assert set(filter(None, format_tables(DEFAULTS, GPUS, CONVERSATIONS))) <= set(DOCUMENT.splitlines())


def test_more_gpus_are_never_slower_and_no_gpu_works_faster_than_its_rate() -> None:
    found = [forecast(DEFAULTS, gpus) for gpus in (1, 2, 8, 64, 512)]
    alone = DEFAULTS.tokens / DEFAULTS.capture_tokens + 1 / DEFAULTS.train_samples
    assert found[0].streamed == pytest.approx(1 / alone, rel=0.01)
    for rates in ([each.streamed for each in found], [each.stored_training for each in found]):
        assert rates == sorted(rates)
    for each in found:
        capture = DEFAULTS.capture_tokens / DEFAULTS.tokens
        assert each.streamed <= min(each.capturing * capture, each.training * DEFAULTS.train_samples) * 1.001
        assert each.stored_capture <= each.gpus * capture * 1.001
        assert each.held_bytes <= (4 * each.step_samples + 16) * DEFAULTS.sample_bytes


def test_hours_are_those_counted_by_hand() -> None:
    """With no limit but the engines': 27 samples/s captured and 6.5 trained by each of eight GPUs."""
    rates = replace(
        DEFAULTS, tokens=1000, store_rate=1e15, node_rate=1e15, put_rate=1e15, get_rate=1e15, commit_s=0.0, ack_s=0.0
    )
    found = forecast(rates, 8)
    assert (found.capturing, found.training) == (2, 6)
    assert found.compute_stored_hours(1e6) == pytest.approx(1e6 / 3600 * (1 / (8 * 27) + 1 / (8 * 6.5)), rel=0.01)
    assert found.compute_streamed_hours(1e6) == pytest.approx(1e6 / 3600 / (6 * 6.5), rel=0.01)


@pytest.mark.parametrize(
    ("changed", "stored", "streamed"),
    [({"store_rate": 1e9}, "store, store", "training"), ({"node_rate": 1e8}, "capture, training", "store"),
     ({"commit_s": 0.1}, "capture, training", "control plane")],
)  # fmt: skip
def test_what_is_slowest_is_named(changed: dict[str, float], stored: str, streamed: str) -> None:
    found = forecast(replace(Rates(), **changed), 64)
    assert (found.stored_bound, found.streamed_bound) == (stored, streamed)


MEASURED_COSTS = Costs(produce_s=0.0583, consume_s=0.0128, store_s=0.0052)
MEASURED_S = {
    "equal pace": 7.4,
    "the engine is the slower one": 10.44,
    "the trainer is the slower one": 8.28,
    "a watermark of one step": 13.92,
    "a store as slow as the engine": 6.63,
}
"""Medians of three turns of benchmarks/scaling_points.py, as docs/scaling.md has them."""


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_measured_runs_are_predicted_within_a_fifth(point) -> None:
    measured, predicted = MEASURED_S[point.name], point.predict(MEASURED_COSTS)
    assert predicted == pytest.approx(measured, rel=0.2)
    assert f"| {measured:.2f} | {predicted:.2f} | {predicted / measured:.2f} |" in DOCUMENT


READ_AND_MEASURED_S = {
    "read one after another": (0.0547, 5.04),
    "read ahead, the steps are slower": (0.0291, 7.35),
    "read ahead, the store is slower": (0.0292, 0.77),
}
"""Medians of three turns of benchmarks/scaling_s3_points.py: seconds to read a batch, and of the whole run."""


@pytest.mark.parametrize("point", S3_POINTS, ids=lambda point: point.name)
def test_measured_runs_on_s3_are_predicted_within_a_fifth(point) -> None:
    read_s, measured = READ_AND_MEASURED_S[point.name]
    predicted = point.predict(read_s)
    assert predicted == pytest.approx(measured, rel=0.2)
    assert f"| {1e3 * read_s:.0f} ms | {measured:.2f} | {predicted:.2f} | {predicted / measured:.2f} |" in DOCUMENT


@pytest.mark.parametrize(("servers", "trainers", "reported"), [(1, 7, 50.1), (2, 6, 39.25)])
def test_reported_splits_of_eight_gpus_are_predicted_within_a_fifth(
    servers: int, trainers: int, reported: float
) -> None:
    step = 16 * trainers
    plant = Plant(*(1.0, servers, 1 / 54.5, 16, step, 16 / 7), watermark=8 * step)
    assert simulate(plant, 60 * step).steady_rate == pytest.approx(reported, rel=0.2)


def test_the_script_writes_rates_and_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(gpus=[2], conversations=[1e6], json_file=tmp_path / "scaling.json")
    assert "| 2, streamed |" in capsys.readouterr().out
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["rates"]["tokens"] == 1024
    assert [each["gpus"] for each in written["forecasts"]] == [2]
