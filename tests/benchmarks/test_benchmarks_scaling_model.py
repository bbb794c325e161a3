"""The simulation of a stream: what goes in comes out, more of anything never takes longer, the slowest part decides.
The forecasts of docs/scaling.md: its tables are the script's, more GPUs are never slower, measured runs are predicted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_model import Plant, simulate
from scaling_points import POINTS, Costs
from scaling_s3_points import POINTS as S3_POINTS
from scaling_simulation import CONVERSATIONS, DEFAULTS, GPUS, Rates, forecast, format_tables, main

PLANT = Plant(sample_bytes=10.0, producers=2, capture_s=0.5, task_samples=4, step_samples=8, step_s=1.0, watermark=32)
PLANTS = st.builds(
    Plant,
    sample_bytes=st.floats(0.1, 100),
    producers=st.integers(1, 5),
    capture_s=st.floats(0, 2),
    task_samples=st.sampled_from([1, 2, 4, 8, 3, 5]),
    step_samples=st.sampled_from([2, 8]),
    step_s=st.floats(0.01, 4),
    watermark=st.integers(16, 64),
    put_rate=st.floats(1, 1000),
    get_rate=st.floats(1, 1000),
    store_rate=st.floats(1, 1000),
    commit_s=st.floats(0, 0.2),
    ack_s=st.floats(0, 0.2),
    in_flight=st.integers(1, 3),
    read_ahead=st.integers(0, 2),
    shares_device=st.booleans(),
)


@given(PLANTS, st.integers(1, 12), st.booleans())
def test_every_sample_is_captured_and_trained_once_within_the_watermark(plant: Plant, steps: int, stored: bool) -> None:
    samples = steps * plant.step_samples
    outcome = simulate(plant, samples, after_capture=stored)
    assert (outcome.captured, outcome.trained, len(outcome.step_ends)) == (samples, samples, steps)
    assert list(outcome.step_ends) == sorted(outcome.step_ends)
    assert outcome.peak_samples <= (samples if stored else plant.watermark)
    assert outcome.engine_share <= 1 + 1e-9
    assert outcome.trainer_share <= 1 + 1e-9


@given(PLANTS, st.integers(2, 12))
def test_no_run_is_faster_than_its_slowest_part(plant: Plant, steps: int) -> None:
    samples = steps * plant.step_samples
    limits = plant.compute_limits()
    assert plant.slowest == min(limits, key=limits.__getitem__)
    for limit in limits.values():
        assert simulate(plant, samples).seconds >= samples / limit * (1 - 1e-9)


@pytest.mark.parametrize(
    "slow",
    [
        {"capture_s": 4.0},
        {"put_rate": 2.0},
        {"store_rate": 6.0},
        {"get_rate": 5.0},
        {"commit_s": 0.8, "ack_s": 0.1},
        {"step_s": 20.0},
    ],
    ids=["capture", "puts", "store", "gets", "control plane", "training"],
)
def test_a_long_run_with_a_wide_watermark_reaches_the_limit_of_its_slowest_part(slow, request) -> None:
    plant = replace(PLANT, watermark=64, **slow)
    assert plant.slowest == request.node.callspec.id
    assert simulate(plant, 4000).steady_rate == pytest.approx(plant.compute_limits()[plant.slowest], rel=0.05)


@given(PLANTS, st.sampled_from(["capture_s", "step_s", "sample_bytes"]), st.floats(1, 3))
def test_a_single_producer_with_slower_parts_is_never_faster(plant: Plant, part: str, factor: float) -> None:
    plant = replace(plant, producers=1, shares_device=False, store_rate=float("inf"), commit_s=0.0, ack_s=0.0)
    slower = replace(plant, **{part: getattr(plant, part) * factor})
    assert simulate(slower, 48).seconds >= simulate(plant, 48).seconds * (1 - 1e-9)


def test_more_producers_and_a_wider_watermark_are_never_slower() -> None:
    by_producers = [simulate(replace(PLANT, producers=count), 160).seconds for count in (1, 2, 3, 4, 8)]
    assert by_producers == sorted(by_producers, reverse=True)
    by_watermark = [simulate(replace(PLANT, watermark=samples), 160).seconds for samples in (8, 16, 32, 64)]
    assert by_watermark == sorted(by_watermark, reverse=True)


def test_seconds_are_those_counted_by_hand() -> None:
    """Two producers: a task of 4 takes 2 s, so both together have a step of 8 every 2 s; a step takes 1 s."""
    assert simulate(PLANT, 24).step_ends == (3.0, 5.0, 7.0)
    assert simulate(PLANT, 24, after_capture=True).step_ends == (7.0, 8.0, 9.0)
    one = replace(PLANT, producers=1)
    assert simulate(one, 16).step_ends == (5.0, 9.0)
    assert simulate(replace(one, watermark=8, put_rate=20.0), 16).step_ends == (7.0, 14.0)
    taking_turns = replace(one, shares_device=True, watermark=8)
    assert simulate(taking_turns, 16).step_ends == (5.0, 10.0)


def test_a_shared_store_carries_one_transfer_after_another() -> None:
    """Puts of 40 bytes at 10 bytes/s: both producers end at 2 s, the first is stored at 6 s and the second at 10 s."""
    outcome = simulate(replace(PLANT, store_rate=10.0), 8)
    assert outcome.captured_at == 10.0
    assert outcome.step_ends == (10.0 + 8.0 + 1.0,)


def test_extrapolation_goes_on_at_the_steady_rate() -> None:
    outcome = simulate(PLANT, 160)
    assert outcome.steady_rate == pytest.approx(4.0)
    assert outcome.extrapolate(160 + 400) == pytest.approx(outcome.seconds + 100)


@pytest.mark.parametrize(
    "changed",
    [{"producers": 0}, {"put_rate": 0.0}, {"watermark": 7}, {"task_samples": 3, "watermark": 10}, {"step_s": -1.0}],
)
def test_impossible_plants_are_refused(changed) -> None:
    with pytest.raises(ValueError):
        replace(PLANT, **changed)


def test_samples_are_whole_steps() -> None:
    with pytest.raises(ValueError, match="whole number of steps"):
        simulate(PLANT, 20)


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
