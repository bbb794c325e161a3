"""Several trainings follow one stream: each is the stored one bit for bit, and the target's pass is paid once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from draft_run_files import DFLASH_OPTIONS, OPTIONS
from forked_ranks import ForkedRanks
from stream_toys import TRAINING, StreamFiles
from waiting import HANG_S, wait_until

from draftworks.config.draft_options import read_draft_config
from draftworks.config.features import StreamFollower, StreamingSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StoreSpec, TrainRun
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.stream.stream_consumer import StreamConsumer
from draftworks.stream.training_stream import count_stream_steps, open_controller

CONTENTS = 12
"""Of the 13 samples two have the same tokens."""


@dataclass(frozen=True)
class Draft:
    """One of the drafts that follow the stream."""

    name: str
    strategy: str = "eagle3"
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    training: TrainingSpec = TRAINING

    def follow(self, files: StreamFiles) -> StreamFollower:
        spec = resolve_strategy(self.strategy)
        streams = spec.list_features(
            files.target.num_layers, spec.parse_options(dict(self.options), where=self.strategy)
        )
        return StreamFollower(name=self.name, streams=list(streams), steps=count_stream_steps(13, self.training))


EAGLE3 = Draft("eagle3")
FASTER = Draft("faster", training=TRAINING.model_copy(update={"lr": 2e-2, "epochs": 1}))
DFLASH = Draft("dflash", "dflash", {**DFLASH_OPTIONS, "layer_ids": [2, 4]})


@dataclass(frozen=True)
class Group:
    """Drafts that follow one stream; each is trained in this process or in one of its own."""

    files: StreamFiles
    drafts: tuple[Draft, ...]

    @property
    def followers(self) -> list[StreamFollower]:
        return [each.follow(self.files) for each in self.drafts]

    def run_of(self, draft: Draft, **changes: Any) -> TrainRun:
        place = self.files.place.model_copy(update={"consumer": draft.name, "followers": self.followers})
        own = {"strategy": draft.strategy, "options": dict(draft.options), "training": draft.training}
        return self.files.train_run(draft.name, **{"stream": place, **own, **changes})

    def train(self, draft: Draft, **changes: Any) -> str:
        return train(self.run_of(draft, **changes), ProgramContext())["weights_digest"]

    def start(self, draft: Draft, **changes: Any) -> ForkedRanks:
        path = self.run_of(draft, **changes).save(self.files.folder / f"{draft.name}-{time.monotonic_ns()}.yaml")
        folder = path.with_suffix("")
        return ForkedRanks.start("draftworks.programs.train", [str(path)], 1, folder, path.with_suffix(".log"))

    def digest_of(self, draft: Draft) -> str:
        return read_draft_config(self.files.folder / draft.name).weights_digest

    def acked(self, draft: Draft) -> int:
        progress = open_controller(self.files.place).read_consumers()
        return progress[draft.name].acked_step if draft.name in progress else 0

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(stream for each in self.followers for stream in each.streams))

    def find_window_end(self, acked_step: int) -> int:
        """Return the last step that producers capture for when the slowest follower has done `acked_step`."""
        run = self.files.produce_run(streams=self.streams, followers=self.followers)
        return self.files.open_rounds(run).open(()).plan.find_window_end(acked_step)

    @contextmanager
    def producing(self):
        with self.files.producing(streams=self.streams, followers=self.followers) as done:
            yield done

    def assert_nothing_left(self) -> None:
        assert open_store(self.files.place.store).health()["samples"] == 0


@pytest.fixture
def make_group(stream_files: StreamFiles) -> Callable[..., Group]:
    def make(*drafts: Draft, **settings: Any) -> Group:
        chosen = StreamingSpec(**{"watermark": {"samples": 8}, "timeout_s": HANG_S, "lease_s": 1.0, **settings})
        return Group(replace(stream_files, settings=chosen), drafts)

    return make


def test_two_strategies_and_two_learning_rates_share_one_pass_of_the_target(make_group, train_stored):
    group = make_group(EAGLE3, FASTER, DFLASH)
    with group.producing() as done:
        others = [group.start(FASTER), group.start(DFLASH)]
        digest = group.train(EAGLE3)
        assert [each.wait() for each in others] == [[0], [0]]
    assert sum(each.captured for each in done) == CONTENTS
    found = {EAGLE3.name: digest, **{each.name: group.digest_of(each) for each in (FASTER, DFLASH)}}
    assert found == {
        each.name: train_stored(each.training, each.strategy, each.options)["weights_digest"] for each in group.drafts
    }
    group.assert_nothing_left()


def test_a_follower_that_fails_keeps_nobody_waiting(make_group, train_stored, monkeypatch: pytest.MonkeyPatch):
    group = make_group(EAGLE3, DFLASH, keep="capture_again")
    acknowledge = StreamConsumer.on_step

    def fail(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if global_step == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(StreamConsumer, "on_step", fail)
    with group.producing():
        other = group.start(EAGLE3)
        with pytest.raises(RuntimeError, match="out of memory"):
            group.train(DFLASH)
        assert open_controller(group.files.place).read_consumers()["dflash"].left == "it has failed: out of memory"
        assert other.wait() == [0]
    assert group.digest_of(EAGLE3) == train_stored()["weights_digest"]
    group.assert_nothing_left()


def test_a_follower_that_is_killed_is_waited_for_and_resumes(make_group, train_stored):
    group = make_group(EAGLE3, DFLASH)
    # Two steps of new samples; once the second epoch's are all stored, nothing is left to wait for.
    assert [group.find_window_end(step) for step in (0, 1, 2)] == [2, 3, 6]
    with group.producing():
        killed, other = group.start(DFLASH), group.start(EAGLE3)
        wait_until(lambda: group.acked(DFLASH) >= 1)
        os.kill(next(iter(killed.codes)), signal.SIGKILL)
        assert killed.wait() == [-signal.SIGKILL]
        done = group.acked(DFLASH)
        time.sleep(0.5)
        assert group.acked(EAGLE3) <= group.find_window_end(done)
        resumed = group.start(DFLASH)
        assert [each.wait() for each in (resumed, other)] == [[0], [0]]
    assert group.digest_of(DFLASH) == train_stored(TRAINING, "dflash", DFLASH.options)["weights_digest"]
    assert group.digest_of(EAGLE3) == train_stored()["weights_digest"]
    group.assert_nothing_left()


def test_a_draft_that_was_stopped_goes_on_alone_from_its_checkpoint(
    make_group, train_stored, monkeypatch: pytest.MonkeyPatch
):
    """Its own stream begins with nothing: only what the steps after the checkpoint take is captured."""
    group = make_group(EAGLE3, FASTER)
    acknowledge = StreamConsumer.on_step

    def die(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if global_step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, group.producing():
        patch.setattr(StreamConsumer, "on_step", die)
        open_controller(group.files.place).record_left("it is not trained now", FASTER.name)
        with pytest.raises(KeyboardInterrupt):
            group.train(EAGLE3)
    own = group.files.folder / "alone"
    place = group.files.place.model_copy(
        update={"database": own / "control.sqlite", "store": StoreSpec(kind="shared_dir", root=own / "stream")}
    )
    trainer = group.start(EAGLE3, stream=place)
    wait_until(lambda: open_controller(place).read_progress().done_step == 4)
    done = group.files.make_worker(group.files.produce_run().model_copy(update={"stream": place})).run()
    assert trainer.wait() == [0]
    assert group.digest_of(EAGLE3) == train_stored()["weights_digest"]
    assert done.captured <= 8, "two steps were left"
    assert open_store(place.store).health()["samples"] == 0


def test_a_training_that_the_stream_is_not_planned_for_is_refused(make_group):
    group = make_group(EAGLE3, DFLASH)
    changed = TRAINING.model_copy(update={"epochs": 5})
    with pytest.raises(ConfigError, match=r"stream\.followers: expected .*'total_steps': 15"):
        group.train(EAGLE3, training=changed)
