"""A sample that fails for good leaves the plan: the draft is that of a stored set with the same samples left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coverings import gate_or_long
from forked_ranks import ForkedRanks
from stream_toys import STREAMS, TRAINING, SerialEngine, StreamFiles, make_rows
from waiting import HANG_S

from draftworks.capture.engine import TargetEngine
from draftworks.config.draft_options import read_draft_config
from draftworks.config.features import StreamFollower, StreamingSpec
from draftworks.errors import CaptureError
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.stream.stream_consumer import StreamConsumer
from draftworks.stream.streaming_plan import StreamOrder
from draftworks.stream.training_stream import count_stream_steps

FIRST_STEP, SECOND_EPOCH, TWINS = ["train7"], ["train8"], ["train0"]
"""Samples of step 1, of step 4 and no earlier one, and of step 1 with one of the same tokens."""
PACKED = TRAINING.model_copy(update={"pack_tokens": 48})


class FailingEngine(SerialEngine):
    """Gives features that are not finite for some samples, always."""

    def __init__(self, engine: TargetEngine, bad: Sequence[str]) -> None:
        super().__init__(engine)
        self._bad = {tuple(row.input_ids.tolist()) for row in make_rows("train", 13, seed=1) if row.sample_id in bad}

    def capture(self, sequences, taps):
        found = super().capture(sequences, taps)
        return [
            {name: tensor * float("nan") for name, tensor in streams.items()} if tuple(row) in self._bad else streams
            for row, streams in zip(sequences, found, strict=True)
        ]


def with_failures(files: StreamFiles, engine: TargetEngine, bad: Sequence[str], **settings: Any) -> StreamFiles:
    failing = FailingEngine(engine, bad)
    chosen = StreamingSpec(**{"watermark": {"samples": 8}, "timeout_s": HANG_S, **settings})
    return replace(files, engine=lambda: failing, capture_options={"max_failed_share": 0.2}, settings=chosen)


def train_both(files: StreamFiles, training=TRAINING) -> tuple[dict[str, Any], dict[str, Any]]:
    files.capture("train")
    stored = train(files.train_run("stored", streamed=False, training=training), ProgramContext())
    with files.producing(training=training):
        streamed = train(files.train_run("streamed", training=training), ProgramContext())
    return streamed, stored


def read_origin(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["provenance"]["train"]


@pytest.mark.parametrize(
    ("bad", "training", "settings"),
    gate_or_long(
        [
            pytest.param(FIRST_STEP, TRAINING, {}, id="first step"),
            pytest.param(SECOND_EPOCH, PACKED, {}, id="second epoch, packed"),
            pytest.param(TWINS, TRAINING, {"free_at": "checkpoint"}, id="twins"),
            pytest.param([*FIRST_STEP, *SECOND_EPOCH], TRAINING, {"keep": "capture_again"}, id="both, captured again"),
        ],
        lambda case: len(case[0]) > 1 or case[1] is PACKED,
    ),
)
def test_the_draft_is_that_of_a_stored_set_with_the_same_samples_left_out(
    stream_files: StreamFiles, tiny_engine, bad, training, settings
):
    files = with_failures(stream_files, tiny_engine, bad, **settings)
    streamed, stored = train_both(files, training)
    left_out = {*bad, *(["train12"] if bad == TWINS else [])}
    assert set(streamed["left_out_samples"]) == left_out
    assert all("values are not finite" in reason for reason in streamed["left_out_samples"].values())
    assert streamed["weights_digest"] == stored["weights_digest"]
    assert streamed["heldout"] == stored["heldout"]
    assert read_origin(files.folder / "streamed") == read_origin(files.folder / "stored")
    written = (files.folder / "streamed" / "quarantine.jsonl").read_text().splitlines()
    assert {json.loads(line)["sample_id"] for line in written} == left_out
    assert {ref.sample_id for ref in read_feature_set(files.folder / "planned").refs} > left_out
    assert open_store(files.place.store).health()["samples"] == 0


def test_the_training_goes_back_to_the_last_checkpoint_before_the_sample(stream_files: StreamFiles, tiny_engine):
    files = with_failures(stream_files, tiny_engine, SECOND_EPOCH)
    with files.producing():
        report = train(files.train_run("streamed"), ProgramContext())
    assert [each["from_step"] for each in report["sessions"]] in ([0, 2], [0, 3])


def test_all_ranks_plan_again_together(stream_files: StreamFiles, tiny_engine):
    """One rank waits for the sample while the other is in the step already."""
    files = with_failures(stream_files, tiny_engine, FIRST_STEP)
    run = files.train_run("streamed", training=TRAINING.model_copy(update={"processes": 2, "micro_batch_size": 1}))
    path = run.save(files.folder / "run.yaml")
    with files.producing(training=run.training):
        ranks = ForkedRanks.start(
            "draftworks.programs.train", [str(path)], 2, files.folder / "ranks", path.with_suffix(".log")
        )
        assert ranks.wait() == [0, 0], path.with_suffix(".log").read_text()
    written = (files.folder / "streamed" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample_id"] for line in written] == FIRST_STEP
    assert open_store(files.place.store).health()["samples"] == 0


@pytest.mark.long
def test_all_followers_of_a_stream_plan_again(stream_files: StreamFiles, tiny_engine):
    files = with_failures(stream_files, tiny_engine, SECOND_EPOCH, lease_s=1.0)
    trainings = {"slow": TRAINING, "fast": TRAINING.model_copy(update={"lr": 2e-2})}
    followers = [
        StreamFollower(name=name, streams=list(STREAMS), steps=count_stream_steps(13, training))
        for name, training in trainings.items()
    ]
    runs = {
        name: files.train_run(
            name, training=training, stream=files.place.model_copy(update={"consumer": name, "followers": followers})
        )
        for name, training in trainings.items()
    }
    path = runs["fast"].save(files.folder / "fast.yaml")
    with files.producing(followers=followers):
        log = path.with_suffix(".log")
        other = ForkedRanks.start("draftworks.programs.train", [str(path)], 1, files.folder / "ranks", log)
        train(runs["slow"], ProgramContext())
        assert other.wait() == [0], log.read_text()
    files.capture("train")
    for name, training in trainings.items():
        stored = train(files.train_run(f"stored-{name}", streamed=False, training=training), ProgramContext())
        assert read_draft_config(files.folder / name).weights_digest == stored["weights_digest"]
    assert open_store(files.place.store).health()["samples"] == 0


def test_a_training_killed_after_it_planned_again_ends_with_the_same_draft(
    stream_files: StreamFiles, tiny_engine, monkeypatch: pytest.MonkeyPatch
):
    files = with_failures(stream_files, tiny_engine, SECOND_EPOCH)
    files.capture("train")
    stored = train(files.train_run("stored", streamed=False), ProgramContext())
    acknowledge = StreamConsumer.on_step

    def die(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if len(self.plan.refs) < 13 and global_step == 5:
            raise KeyboardInterrupt

    with files.producing():
        with monkeypatch.context() as patch:
            patch.setattr(StreamConsumer, "on_step", die)
            with pytest.raises(KeyboardInterrupt):
                train(files.train_run("streamed"), ProgramContext())
        again = train(files.train_run("streamed"), ProgramContext())
    assert again["weights_digest"] == stored["weights_digest"]
    assert set(again["left_out_samples"]) == set(SECOND_EPOCH)
    assert open_store(files.place.store).health()["samples"] == 0


def test_more_failures_than_allowed_end_the_training_with_the_reason(stream_files: StreamFiles, tiny_engine):
    files = with_failures(stream_files, tiny_engine, ["train7", "train10", "train5"])
    files = replace(files, capture_options={"max_failed_share": 0.5})  # no producer is the first to give up
    run = files.train_run("streamed")
    assert run.stream is not None
    place = run.stream.model_copy(update={"max_failed_share": 0.05})
    with (
        files.producing(),
        pytest.raises(
            CaptureError, match=r"of 13 samples have no valid features.*max_failed_share = 0\.05.*not finite"
        ),
    ):
        train(run.model_copy(update={"stream": place}), ProgramContext())


def test_orders_part_where_the_first_sample_is_missing_or_a_training_gets_shorter():
    complete = StreamOrder(13, 4, 42, 6)
    place_of = {int(sample): step for step in range(6, 0, -1) for sample in complete.get_samples(step)}
    for sample in range(13):
        assert complete.count_common_steps(StreamOrder(12, 4, 42, 6, (sample,))) == place_of[sample] - 1
    assert complete.count_common_steps(StreamOrder(11, 4, 42, 4, (1, 2))) == 0
    assert complete.count_common_steps(complete) == 6
