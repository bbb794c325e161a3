"""A feature is in the store as long as a training that takes part needs it, and goes when the last no longer does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.features import StreamFollower, StreamingSpec, StreamSteps
from draftworks.config.run_files import StreamPlace
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureSpec, SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore
from draftworks.stream.stream_consumer import StreamClaims, StreamConsumer
from draftworks.stream.stream_rounds import make_streaming_plan

STREAMS = ("hf1", "hf2", "last")


class KeySet:
    """As much of a keyed store as a consumer uses: the keys that it holds."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.keys]

    def free(self, keys: Iterable[str]) -> int:
        self.keys.difference_update(keys)
        return 0

    def refresh(self) -> None:
        pass


def make_refs(contents: list[int]) -> list[SampleRef]:
    specs = {stream: FeatureSpec(stream, (1, 1), "float32") for stream in STREAMS}
    return [
        SampleRef(f"s{i}", "run", f"s{i}", "mem://", {each: f"{each}-{c}" for each in STREAMS}, specs, num_tokens=c + 1)
        for i, c in enumerate(contents)
    ]


class Model:
    """Producers and several trainings of one stream, one action at a time."""

    def __init__(self, refs: list[SampleRef], place: StreamPlace, free_at: str) -> None:
        followers = {each.name: each for each in place.followers}
        self.free_at = free_at
        self.shared = make_streaming_plan(refs, (), place.followers[0].steps, place)
        self.store, self.control = KeySet(), InMemoryMetadataStore()
        self.done = dict.fromkeys(followers, 0)
        self.saved = dict.fromkeys(followers, 0)
        self.present = dict.fromkeys(followers, True)
        self.consumers = {name: self.start(name) for name in followers}

    def controller(self, name: str) -> DataFlowController:
        return DataFlowController("run", self.control, consumer=name)

    def start(self, name: str) -> StreamConsumer:
        own = self.shared.followers[name]
        return StreamConsumer(own, self.controller(name), self.store, self.free_at, self.shared)  # type: ignore[arg-type]

    def capture(self) -> bool:
        """What one visit of a producer does, see `PlannedOrder`."""
        control, claims = self.controller("producer"), StreamClaims(self.shared, "")
        progress = control.read_consumers()
        done = claims.find_done_step(progress)
        if done is None:
            return False
        end = self.shared.find_window_end(done)
        for group in self.shared.groups:
            if group.last <= end:
                control.add_tasks(self.shared.make_tasks(group, "run", 4))
        leases = control.lease_tasks("producer", max_step=end)
        for lease in leases:
            jobs = self.shared.list_jobs(lease.task)
            for job, streams in zip(jobs, claims.drop_unneeded(jobs, progress, end), strict=True):
                self.store.keys.update(job.keys[stream] for stream in streams)
            refs = self.shared.get_refs(lease.task.sample_ids)
            control.commit_samples([replace(ref, source_task_id=lease.task.task_id) for ref in refs], [lease])
        return bool(leases)

    def keys_of_step(self, name: str, step: int) -> set[str]:
        plan = self.shared.followers[name]
        return {key for ref in plan.get_refs(plan.get_sample_ids(step)) for key in ref.feature_keys.values()}

    def train(self, name: str) -> bool:
        """One step, if its features are there; what is lost is asked for again, as while waiting."""
        step, plan = self.done[name] + 1, self.shared.followers[name]
        if not self.present[name] or step > plan.order.total_steps:
            return False
        if self.store.find_missing(self.keys_of_step(name, step)):
            for ref in plan.get_refs(plan.get_sample_ids(step)):
                self.consumers[name].look(ref)
            return False
        self.consumers[name].on_step(step)
        self.done[name] = step
        if step % 2 == 0 or step == plan.order.total_steps:
            self.saved[name] = step
            self.consumers[name].on_checkpoint(step)
        return True

    def die_and_resume(self, name: str) -> None:
        self.done[name], self.present[name] = self.saved[name], True
        self.consumers[name] = self.start(name)
        self.consumers[name].reconcile(self.saved[name])

    def leave(self, name: str) -> None:
        self.present[name] = False
        self.consumers[name].finish("it has failed")

    def needed(self) -> set[str]:
        """The features that a training needs by its own steps."""
        done = self.done if self.free_at == "step" else self.saved
        return {
            key
            for name, plan in self.shared.followers.items()
            if self.present[name]
            for step in range(done[name] + 1, plan.order.total_steps + 1)
            for key in self.keys_of_step(name, step)
        }

    def finish(self) -> None:
        for _ in range(2000):
            moved = [self.capture(), *(self.train(name) for name in self.done)]
            for name, plan in self.shared.followers.items():
                if self.present[name] and self.done[name] == plan.order.total_steps:
                    self.consumers[name].finish()
                    self.present[name] = False
            if not any(self.present.values()):
                return
            if not any(moved):
                assert self.capture() or any(self.train(name) for name in self.done), "nobody goes on"
        raise AssertionError("the trainings do not end")


@st.composite
def models(draw: st.DrawFn) -> Model:
    contents = draw(st.lists(st.integers(0, 9), min_size=2, max_size=10))
    batch = draw(st.integers(1, min(3, len(contents))))
    per_epoch, seed = len(contents) // batch, draw(st.integers(0, 3))
    followers = [
        StreamFollower(
            name=name,
            streams=draw(st.lists(st.sampled_from(STREAMS), min_size=1, unique=True)),
            steps=StreamSteps(global_batch_size=batch, seed=seed, total_steps=draw(st.integers(1, 2 * per_epoch + 1))),
        )
        for name in ("a", "b", "c")[: draw(st.integers(2, 3))]
    ]
    free_at = draw(st.sampled_from(["step", "checkpoint"]))
    keep = draw(st.sampled_from(["until_last_use", "capture_again"]))
    spec = StreamingSpec(watermark={"samples": batch * draw(st.integers(1, 3))}, keep=keep, free_at=free_at)
    place = StreamPlace(database="none", store="none", settings=spec, consumer="a", followers=followers)
    return Model(make_refs(contents), place, free_at)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["capture", "capture", "train", "train", "train", "die", "leave"]), st.integers(0, 2)),
    max_size=30,
)


@given(models(), ACTIONS)
def test_a_feature_stays_as_long_as_a_training_needs_it_and_goes_then(model: Model, actions):
    names = list(model.done)
    for action, index in actions:
        name, before = names[index % len(names)], set(model.store.keys)
        if action == "capture":
            model.capture()
        elif action == "train":
            model.train(name)
        elif action == "die" and model.present[name]:
            model.die_and_resume(name)
        elif action == "leave" and sum(model.present.values()) > 1:
            model.leave(name)
        needed = model.needed()
        assert model.store.keys <= needed
        if model.shared.keep == "until_last_use":
            assert not (before - model.store.keys) & needed
    model.finish()
    assert not model.store.keys


def test_a_training_whose_claims_somebody_else_gives_up_is_waited_for_no_longer():
    steps = StreamSteps(global_batch_size=1, seed=0, total_steps=4)
    followers = [StreamFollower(name=name, streams=["last"], steps=steps) for name in ("a", "b")]
    settings = StreamingSpec(watermark={"samples": 2})
    place = StreamPlace(database="none", store="none", settings=settings, consumer="a", followers=followers)
    model = Model(make_refs([0, 1, 2, 3]), place, "step")
    while model.capture() or model.train("a"):
        pass
    assert model.done == {"a": 2, "b": 0}
    assert "b, which follows the same stream, has done step 0" in model.consumers["a"].explain_wait()
    model.controller("launcher").record_left("it was killed", "b")
    while model.capture() or model.train("a"):
        pass
    assert model.done["a"] == 4
    assert not model.store.keys


@pytest.mark.parametrize(("name", "found"), [("seed", "seed is 1 and 2"), ("global_batch_size", "size is 1 and 2")])
def test_followers_with_different_schedules_are_refused_with_both_values(name: str, found: str):
    steps = {"global_batch_size": 1, "seed": 1, "total_steps": 2}
    followers = [
        StreamFollower(name=each, streams=["last"], steps=StreamSteps(**{**steps, name: value}))
        for each, value in (("eagle3", 1), ("dflash", 2))
    ]
    place = StreamPlace(database="none", store="none", consumer="eagle3", followers=followers)
    with pytest.raises(ConfigError, match=f"eagle3 and dflash cannot follow one stream: .*{found}"):
        make_streaming_plan(make_refs([0, 1]), ["last"], followers[0].steps, place)
