"""A committed reference has its features, however commits, releases, removals and deaths fall together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from dataflow_toys import Clock, controller_of, toy_slim_ref
from store_kinds import open_keyed_store
from waiting import HANG_S

from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.reconcile import reconcile_on_restart
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore
from draftworks.stream.step_acks import free_unused
from draftworks.stream.tasks import PromptTask

CONTENTS, SAMPLES = 5, 40


def make_ref(number: int, rng: random.Random) -> SampleRef:
    """A sample of one of few contents, with a mask of its own or of few."""
    ref = toy_slim_ref(f"s{number}")
    content, mask = number % CONTENTS, rng.choice([f"mask{number}", f"mask-{number % CONTENTS}"])
    return replace(ref, feature_keys={"hf2": f"hf2-{content}", "last": mask})


class Producer:
    """Captures one task at a time, in steps; it may die between any two."""

    def __init__(
        self, name: str, controller: DataFlowController, store: KeyedFeatureStore, refs: list[SampleRef]
    ) -> None:
        self.name = name
        self.controller = controller
        self.store = store
        self.refs = {ref.sample_id: ref for ref in refs}
        self.put: set[str] = set()
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        while True:
            leases = self.controller.lease_tasks(self.name)
            if not leases:
                yield
                continue
            (lease,) = leases
            frees = lease.frees
            refs = [replace(self.refs[each], source_task_id=lease.task.task_id) for each in lease.task.sample_ids]
            while refs:
                yield
                missing = set(self.store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
                yield
                for ref in refs:
                    names = tuple(name for name, key in ref.feature_keys.items() if key in missing)
                    shapes = {name: ref.feature_specs[name].shape for name in names}
                    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
                    self.put |= set(ref.select(names).feature_keys.values())
                    self.store.put(ref.select(names), tensors)
                    yield
                self.put.clear()
                done = self.controller.commit_samples(refs, [lease], frees)
                refs, frees = [ref for ref in refs if ref.sample_id in done.stale], done.frees


class Consumer:
    """Trains what is committed, two samples a step; it saves now and then, and may die between any two of its steps."""

    def __init__(self, controller: DataFlowController, store: KeyedFeatureStore, free_at: str, saved: int) -> None:
        self.controller = controller
        self.store = store
        self.free_at = free_at
        self.saved = saved
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        step, cursor, waiting, freed = self.saved, 0, [], ()
        reconcile_on_restart(self.controller, self.store, step, release=True)
        free_unused(self.controller, self.store)
        while True:
            yield
            page = self.controller.read_refs(cursor, 3, acked=False)
            cursor, waiting = page.cursor, [*waiting, *page.refs]
            if len(waiting) < 2:
                free_unused(self.controller, self.store, freed=freed)
                freed = ()
                continue
            taken, waiting = waiting[:2], waiting[2:]
            for ref in taken:
                self.store.release(self.store.get(ref)[1])  # raises if a feature is gone
            step += 1
            yield
            release = self.free_at == "step"
            freed = self.controller.ack_step([ref.sample_id for ref in taken], step, 0, release, freed).unused
            yield
            self.store.free(freed)
            if step % 3 == 0:
                yield
                self.saved = step
                yield
                self.controller.record_checkpoint(step, release=True)


@pytest.fixture(params=["memory", "shared", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyedFeatureStore]:
    if request.param != "mooncake":
        yield open_keyed_store(request.param, tmp_path)
        return
    from mooncake_toys import running_mooncake

    from draftworks.features.mooncake_store import MooncakeFeatureStore

    with running_mooncake(tmp_path) as service:
        opened = MooncakeFeatureStore(service.address_file, HANG_S)
        yield opened
        opened.close()


@pytest.mark.parametrize("free_at", ["step", "checkpoint"])
@pytest.mark.parametrize("seed", gate_or_long(range(40), range(4)))
def test_no_committed_reference_loses_its_features(store: KeyedFeatureStore, free_at: str, seed: int):
    rng, clock = random.Random(seed), Clock()
    controller = controller_of(InMemoryMetadataStore(), clock, max_attempts=10**6)
    refs = [make_ref(number, rng) for number in range(SAMPLES)]
    size = rng.choice([1, 2, 3])
    groups = [refs[first : first + size] for first in range(0, SAMPLES, size)]
    controller.add_tasks(
        [PromptTask(f"t{n}", "run", tuple(ref.sample_id for ref in group)) for n, group in enumerate(groups)]
    )
    consumer = Consumer(controller, store, free_at, 0)
    producers = [Producer(f"p{number}", controller, store, refs) for number in range(3)]
    turns, orphans = 0, set()
    while controller.count_tasks().open or len(list(controller.iterate_refs(acked=False))) > 1:
        turns += 1
        assert turns < 20000, "it does not end"
        actor = rng.choice([consumer, *producers])
        if turns < 3000 and rng.random() < 0.01:
            clock.now += 1000  # leases of the dead, and of the slow, are over
            if actor is consumer:
                consumer = Consumer(controller, store, free_at, consumer.saved)
            else:
                orphans |= actor.put
                producers[producers.index(actor)] = Producer(actor.name, controller, store, refs)  # type: ignore[arg-type]
            continue
        next(actor.steps)
        kept = controller.iterate_refs(acked=False)
        gone = store.find_missing(key for ref in kept for key in ref.feature_keys.values())
        assert not gone or actor is consumer, f"turn {turns}: {gone}"
    order = [each for step in controller.read_order() for each in step.sample_ids]
    assert len(order) == len(set(order)) >= SAMPLES - 1
    free_unused(controller, store, everything=True)
    orphans = orphans.union(*(producer.put for producer in producers))
    keys = {key for ref in refs for key in ref.feature_keys.values()}
    assert keys - set(store.find_missing(keys)) <= orphans, "left is what was put and never committed, at most"
