"""Rates: those of this target before those of another one, those before documented ones, and wider bounds each time."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_toys import LLAMA_8B, PlannedTarget

from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.rates import find_rate, measure_answers, measure_capture, measure_training

SMALL = {**LLAMA_8B, "num_hidden_layers": 16}
NARROW = {**LLAMA_8B, "hidden_size": 2048}
CUDA = {"capture": {"device": "cuda"}}


def publish_answers(target: PlannedTarget, rate: float, tokens: int = 1_000_000, **identity) -> None:
    made_from = {"backend": "hf", "conversations": f"{rate}", **identity}
    target.publish("responses", made_from, f"{rate}", generated_tokens=tokens, tokens_per_second=rate)


def make_slow(monkeypatch, seconds: float) -> None:
    """Let results be made in so many seconds, by a clock that stands still in between."""
    clock = iter(float(n) * seconds for n in range(1000))
    monkeypatch.setattr("draftworks.storage.artifacts.time.time", lambda: 1_800_000_000 + next(clock))


def test_measured_before_scaled_before_documented(tmp_path: Path, monkeypatch):
    make_slow(monkeypatch, 2000)
    one = PlannedTarget(tmp_path, "one", entry=CUDA)
    documented = find_rate(one.subject, "regenerate", "cuda", 1)
    assert documented.source.kind == "documented"
    assert documented.tokens_per_s.value == pytest.approx(3160)  # of a target of this very size
    other = PlannedTarget(tmp_path, "other", shape=SMALL, entry=CUDA)
    publish_answers(other, 1000)
    scaled = find_rate(one.subject, "regenerate", "cuda", 1)
    assert (scaled.source.kind, "target other" in scaled.source.text) == ("scaled", True)
    assert scaled.tokens_per_s.value == pytest.approx(500)
    publish_answers(one, 800)
    measured = find_rate(one.subject, "regenerate", "cuda", 1)
    assert measured.source.kind == "measured"
    assert measured.tokens_per_s.value == pytest.approx(800)
    assert measured.tokens_per_s.high / measured.tokens_per_s.low == pytest.approx(1.25**2)
    assert scaled.tokens_per_s.high / scaled.tokens_per_s.low == pytest.approx(2.5**2)
    widths = [each.tokens_per_s.high / each.tokens_per_s.low for each in (measured, scaled, documented)]
    assert widths == sorted(widths)


def test_several_runs_give_their_spread_and_the_newest_count(tmp_path: Path, monkeypatch):
    make_slow(monkeypatch, 2000)
    target = PlannedTarget(tmp_path, entry=CUDA)
    for rate in (10_000, 700, 800, 900, 1000, 1100):  # the first is the sixth newest
        publish_answers(target, rate)
    publish_answers(target, 5, tokens=100)  # a few tokens: mostly the start
    publish_answers(target, 77, backend="sglang_server")  # another engine
    found = find_rate(target.subject, "regenerate", "cuda", 1).tokens_per_s
    assert found.low == pytest.approx(700 / 1.1)
    assert found.high == pytest.approx(1100 * 1.1)
    assert 700 < found.value < 1100


def test_a_target_on_another_kind_of_device_is_no_measure(tmp_path: Path, monkeypatch):
    make_slow(monkeypatch, 2000)
    one = PlannedTarget(tmp_path, "one", entry={"capture": {"device": "cpu"}})
    publish_answers(PlannedTarget(tmp_path, "other", entry=CUDA), 1000)
    assert find_rate(one.subject, "regenerate", "cpu", 1).source.kind == "documented"


def publish_draft(target: PlannedTarget, waited: float, **summary) -> None:
    figures = {"tokens": 40_000, "world_size": 2, "sessions": [{"started": 1_800_000_000 + waited, "ranks": 2}]}
    target.publish("eagle3_draft", {"strategy": "eagle3"}, "weights", **{**figures, **summary})


@pytest.mark.parametrize(
    ("summary", "counts"),
    [
        ({}, True),
        ({"stream": {"producers": 1}}, False),
        ({"sessions": []}, False),
        ({"sessions": [{"started": 1_800_000_001}, {"started": 1_800_000_002}]}, False),
        ({"sessions": [{"started": 1.0}]}, False),
        ({"tokens": 0}, False),
    ],
    ids=["one", "stream", "none", "resumed", "clock", "untrained"],
)
def test_trainings_that_were_interrupted_or_streamed_are_no_measure(tmp_path: Path, monkeypatch, summary, counts):
    make_slow(monkeypatch, 50)
    target = PlannedTarget(tmp_path)
    publish_draft(target, waited=10, **summary)
    found = measure_training(target.subject.list_results("eagle3_draft")[0])
    assert (found is not None) == counts
    if found is not None:
        assert found.start_s == pytest.approx(10)
        assert found.tokens_per_s == pytest.approx(40_000 / (found.result.seconds - 10))


def test_a_trainings_rate_grows_with_its_ranks(tmp_path: Path, monkeypatch):
    make_slow(monkeypatch, 50)
    target = PlannedTarget(tmp_path)
    publish_draft(target, waited=10)
    rates = {ranks: find_rate(target.subject, "train", "auto", ranks, "eagle3").tokens_per_s.value for ranks in (2, 8)}
    assert rates[8] == pytest.approx(4 * rates[2])


@pytest.mark.parametrize("program", ["regenerate", "capture", "train", "evaluate"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_documented_rate_grows_with_the_ranks_and_the_start_does_not(tmp_path: Path, program, device):
    target = PlannedTarget(tmp_path, entry={"capture": {"device": device}})
    one, eight = (find_rate(target.subject, program, device, ranks, "eagle3") for ranks in (1, 8))
    assert one.source.kind == "documented"
    for rate, of_eight in zip(astuple(one.tokens_per_s), astuple(eight.tokens_per_s), strict=True):
        assert of_eight == pytest.approx(8 * rate)
    assert eight.start_s == one.start_s


@pytest.mark.parametrize("program", ["regenerate", "capture", "train", "evaluate"])
def test_by_documented_rates_a_larger_target_is_slower(tmp_path: Path, program):
    large, small = (
        PlannedTarget(tmp_path, "large", entry=CUDA),
        PlannedTarget(tmp_path, "small", shape=NARROW, entry=CUDA),
    )
    speeds = [find_rate(each.subject, program, "cuda", 1, "eagle3").tokens_per_s.value for each in (large, small)]
    assert speeds[0] < speeds[1]


def test_records_that_lack_figures_measure_nothing(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    for asset in ("responses", "training_features", "eagle3_draft", "eagle3_report", "eagle3_export"):
        target.publish(asset, {"draft": "earlier"}, "earlier")
    subject = target.subject
    assert measure_answers(subject.list_results("responses")[0], "hf") is None
    assert measure_capture(subject.list_results("training_features")[0], "hf") is None
    assert target.plan().chosen.gpu_hours.value > 0


ESTIMATES = st.tuples(*[st.floats(0.001, 1e9)] * 3).map(lambda each: Estimate(*sorted(each)))


@given(one=ESTIMATES, other=ESTIMATES, factor=st.floats(1e-3, 1e3))
def test_bounds_of_estimates_hold_what_they_are_made_of(one: Estimate, other: Estimate, factor: float):
    for found in (one + other, one * factor, one.divide_by(other), one.times(other), one.cap(5), one.subtract(5)):
        assert 0 <= found.low <= found.value <= found.high
    assert one.high / other.value * (1 - 1e-9) <= one.divide_by(other).high <= one.high / other.low * (1 + 1e-9)
    assert one.times(Estimate.exactly(factor)).high == pytest.approx((one * factor).high)
    assert Estimate.from_json(one.to_json()) == one
    for wrong in ((2, 1, 3), (-1, 0, 1), (1, 3, 2)):
        with pytest.raises(ValueError, match="expected 0 <= low"):
            Estimate(*wrong)


def test_the_less_sure_source_counts():
    kinds = ("counted", "measured", "scaled", "documented")
    sources = [Source(kind, kind) for kind in kinds]
    for number, better in enumerate(sources):
        for worse in sources[number:]:
            assert better.or_worse(worse) == worse == worse.or_worse(better)
