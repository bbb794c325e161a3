"""Plans of targets of which nothing is made: bytes by hand, and how they grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_toys import PlannedTarget
from served_toys import body, write_log

from draftworks.config.registry_files import TrainingSpec
from draftworks.errors import ConfigError
from draftworks.planning.amounts import Amount, count_token_bytes, count_training_tokens
from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.plan import add_plans
from draftworks.planning.rates import find_rate
from draftworks.planning.steps import StepPlanner

SAMPLES, TOKENS = 500_000, 1_500


def size(samples: float, tokens: float) -> Amount:
    of = Estimate.exactly
    return Amount(of(samples), of(samples * tokens), of(samples * tokens / 2), Source("counted", "the test"))


def plan_way(target: PlannedTarget, way, train: Amount, heldout: Amount):
    subject = target.subject
    trainings = {name: entry.training for name, entry in subject.target.strategies.items()}
    planner = StepPlanner(subject, {"train": train, "heldout": heldout}, way, tuple(trainings), trainings)
    return planner, {each.asset: each for each in planner.list_steps()}


def test_bytes_of_eagle3_for_llama_8b_by_hand(tmp_path: Path):
    """Three taps and `last`, 4,096 wide: 4 x 8,192 bytes a token; fp8: 3 x 4,100 + 8,192; all fp8: 4 x 4,100."""
    target = PlannedTarget(tmp_path)
    expected = {"stored": 24_576_000_000_000, "fp8": 15_369_000_000_000, "streamed": 0}
    for way, nbytes in expected.items():
        _, steps = plan_way(target, way, size(SAMPLES, TOKENS), size(100, TOKENS))
        assert steps["training_features"].nbytes == Estimate.exactly(nbytes)
        assert steps["heldout_eval_features"].nbytes == Estimate.exactly(100 * TOKENS * 32_768)
    target.edit(capture={"storage": "fp8"})
    _, steps = plan_way(target, "fp8", size(SAMPLES, TOKENS), size(100, TOKENS))
    assert steps["training_features"].nbytes == Estimate.exactly(12_300_000_000_000)


def test_a_stream_holds_its_watermark_or_everything_for_later_epochs(tmp_path: Path):
    target = PlannedTarget(tmp_path, entry={"streaming": {"watermark": {"samples": 256}}})
    planner, steps = plan_way(target, "streamed", size(SAMPLES, TOKENS), size(100, TOKENS))
    heldout = 100 * TOKENS * 32_768
    assert planner.count_peak_bytes(tuple(steps.values())).value == heldout + 256 * TOKENS * 32_768
    everything = {"strategies": {"eagle3": {"training": {"epochs": 2}}}, "capture": {"budget_gb": 1e6}}
    target.edit(**everything)
    planner, steps = plan_way(target, "streamed", size(SAMPLES, TOKENS), size(100, TOKENS))
    assert planner.count_peak_bytes(tuple(steps.values())).value == heldout + SAMPLES * TOKENS * 32_768
    target.edit(capture={"budget_gb": 1})  # too large to be kept: captured again in each epoch
    planner, steps = plan_way(target, "streamed", size(SAMPLES, TOKENS), size(100, TOKENS))
    assert planner.count_peak_bytes(tuple(steps.values())).value == heldout + 256 * TOKENS * 32_768


@settings(max_examples=20)
@given(samples=st.integers(1, 1000).map(lambda n: n * 64), tokens=st.integers(10, 4000))
def test_twice_the_samples_are_twice_the_variable_part(tmp_path_factory, samples: int, tokens: int):
    target = PlannedTarget(tmp_path_factory.mktemp("twice"), rows=1)
    subject = target.subject
    for way in ("stored", "streamed"):
        once, twice = (
            plan_way(target, way, size(count, tokens), size(100, tokens))[1] for count in (samples, 2 * samples)
        )
        for asset, program in {"training_features": "capture", "responses": "regenerate"}.items():
            start = find_rate(subject, program, "auto", 1).start_s.value
            assert twice[asset].seconds.value - start == pytest.approx(2 * (once[asset].seconds.value - start))
            assert twice[asset].nbytes.value == pytest.approx(2 * once[asset].nbytes.value)
        assert twice["eagle3_draft"].tokens.value == pytest.approx(2 * once["eagle3_draft"].tokens.value)
        for asset in ("heldout_responses", "heldout_eval_features", "eagle3_report", "eagle3_export"):
            assert twice[asset] == once[asset]


@given(samples=st.integers(0, 10_000), batch=st.integers(1, 64), epochs=st.integers(1, 4))
def test_trained_tokens_are_those_of_the_steps(samples: int, batch: int, epochs: int):
    training = TrainingSpec(global_batch_size=batch, micro_batch_size=1, epochs=epochs)
    found = count_training_tokens(training, size(samples, 100.0))
    expected = training.count_steps(samples // batch) * batch * 100 if samples else 0
    assert found.value == pytest.approx(expected)


def test_money_is_hours_and_bytes_times_prices(tmp_path: Path):
    prices = {"gpu_hour": 2.5, "storage_gb_month": 0.02, "currency": "EUR"}
    plan = PlannedTarget(tmp_path, deployment={"prices": prices}).plan()
    for way in plan.ways.values():
        money = plan.price(way.way)
        assert money is not None
        assert money.currency == "EUR"
        assert money.compute.value == pytest.approx(2.5 * way.gpu_hours.value)
        assert money.storage_month.value == pytest.approx(0.02 * way.nbytes.value / 1e9)
    assert PlannedTarget(tmp_path / "other").plan().price("stored") is None


def test_data_that_targets_share_counts_once(tmp_path: Path):
    one, other = PlannedTarget(tmp_path, "one"), PlannedTarget(tmp_path, "other")
    other.edit(model="models/one")
    plans = [one.plan(), other.plan()]
    together, alone = add_plans(plans).ways["stored"], plans[0].ways["stored"]
    assert together.nbytes == alone.nbytes
    assert sum(step.asset == "training_features" for step in together.steps) == 1
    assert sum(step.asset == "eagle3_draft" for step in together.steps) == 2
    training = alone.find_step("eagle3_draft")
    assert training is not None
    assert together.gpu_hours.value < 2 * alone.gpu_hours.value
    apart = add_plans([one.plan(), PlannedTarget(tmp_path, "third").plan()]).ways["stored"]
    assert apart.nbytes.value == pytest.approx(2 * alone.nbytes.value)


def test_tokens_are_estimated_from_the_first_rows(tmp_path: Path):
    """400 characters of prompt and 1,200 of an answer: 100 and 300 tokens, at 3 to 5 characters a token. Of 800 to 1,000
    rows nine in ten are chosen by hash, give or take two deviations: 2 x sqrt(72) = 16.97 and 2 x sqrt(90) = 18.97."""
    target = PlannedTarget(tmp_path, rows=1000, entry={"responses": {"mode": "passthrough"}})
    train = target.plan().amounts["train"]
    assert (train.samples.low, train.samples.value, train.samples.high) == pytest.approx(
        (703.03, 900, 918.97), abs=0.01
    )
    assert train.tokens.value == pytest.approx(900 * 400)
    assert train.tokens.low <= 900 * 320 < 900 * 400 < train.tokens.high
    assert train.generated == Estimate.exactly(0)
    target.edit(responses={"max_new_tokens": 200}, data={"max_conversations": 100})
    train = target.plan().amounts["train"]
    assert (train.samples.low, train.samples.value, train.samples.high) == pytest.approx((84, 90, 96))
    assert train.generated.value == 90 * 200


def test_answers_that_are_not_there_are_guessed_up_to_their_limit(tmp_path: Path):
    """400 characters of prompt are 100 tokens; where the data has no answer, the target says what the limit allows."""
    target = PlannedTarget(tmp_path, rows=100, entry={"responses": {"max_new_tokens": 96}})
    asked = json.dumps({"messages": [{"role": "user", "content": "x" * 400}]}) + "\n"
    (target.root / "registry" / "data" / "talks.jsonl").write_text(asked * 100)
    train = target.plan().amounts["train"]
    assert (train.generated.value, train.tokens.value) == pytest.approx((90 * 96, 90 * 196))
    assert train.generated.low < 90 * 60


def add_log(target: PlannedTarget, rows: int) -> None:
    """A log of chats of two messages, each logged with the first message alone too: as many prompts as rows / 2."""
    asked = [f"{n} ".ljust(400, "x") for n in range(rows // 2)]
    write_log(target.root / "log", [row for one in asked for row in (body(one), body(one, "y" * 400))])
    (target.root / "registry" / "datasets" / "served.yaml").write_text("files: [../log]\nformat: served\n")
    (target.root / "registry" / "evals").mkdir(exist_ok=True)
    (target.root / "registry" / "evals" / "served.yaml").write_text("dataset: served\npart: held_out\n")


def test_prompts_of_a_log_and_of_a_mix_are_counted(tmp_path: Path, monkeypatch):
    """200 prompts of 800 characters beside 300 rows of 400: 200 tokens and two answers, 100 tokens and one."""
    target = PlannedTarget(tmp_path, rows=300)
    add_log(target, 400)
    target.edit(dataset="served", evals=["served"], responses={"mode": "regenerate", "max_new_tokens": 60})
    amounts = target.plan().amounts
    assert (amounts["train"].samples.value, amounts["served"].samples.value) == (180, 20)
    assert amounts["train"].tokens.value == pytest.approx(180 * (200 + 2 * 60))
    target.edit(mix={"datasets": ["served"]}, dataset="talks")
    amounts = target.plan().amounts
    assert (amounts["train"].samples.value, amounts["served"].samples.value) == (450, 20)
    assert amounts["train"].tokens.value == pytest.approx(450 * (0.4 * (200 + 2 * 60) + 0.6 * (100 + 60)), rel=0.01)
    target.edit(data={"max_conversations": 100})
    assert target.plan().amounts["train"].samples.value == 90
    monkeypatch.setattr("draftworks.planning.data_sample._SERVED_BYTES", (target.root / "log").stat().st_size // 4)
    served = target.plan().amounts["served"].samples
    assert served.low < 20 < served.high
    assert served.value == pytest.approx(20, rel=0.1)


def test_what_is_not_known_is_one_clear_error(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    with pytest.raises(ConfigError, match="does not use the strategy 'dflash'; there is: eagle3"):
        target.plan("dflash")
    (target.root / "registry" / "datasets" / "talks.yaml").write_text("files: ['s3://bucket/a.jsonl']\n")
    with pytest.raises(
        ConfigError, match="Set data.max_conversations of target one, or run: draftworks run prepare --target one"
    ):
        target.plan()
    target.edit(data={"max_conversations": 100})
    assert target.plan().amounts["train"].samples.value == 90
    target.edit(mix={"weights": "weights/one.json"})
    with pytest.raises(ConfigError, match="weights/one.json. Write it with: draftworks slices one"):
        target.plan()


def test_bytes_of_a_token_are_those_of_the_streams(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    capture = target.subject.target.capture
    assert count_token_bytes(target.subject, capture) == 4 * 4096 * 2
    assert count_token_bytes(target.subject, capture.model_copy(update={"dtype": "float32"})) == 4 * 4096 * 4
