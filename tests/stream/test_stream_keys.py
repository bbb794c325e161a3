"""A committed reference has its features, however commits, releases, removals and deaths fall together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from coverings import gate_or_long
from dataflow_toys import Clock, controller_of
from key_actors import SAMPLES, Consumer, Producer, add_tasks, is_over, make_ref
from store_kinds import open_keyed_store
from waiting import HANG_S

from draftworks.features.contracts import KeyedFeatureStore
from draftworks.stream.controller import ControlPlane
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore
from draftworks.stream.step_acks import StepAcks, free_unused


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
    add_tasks(controller, refs, rng.choice([1, 2, 3]))
    consumer = Consumer(controller, store, free_at, 0)
    producers = [Producer(f"p{number}", controller, store, refs) for number in range(3)]
    turns, orphans = 0, set()
    while not is_over(controller):
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


def test_what_two_producers_put_while_it_was_being_removed_is_removed_again():
    controller = controller_of(InMemoryMetadataStore(), Clock())
    ref = make_ref(0, random.Random(0))
    keys = set(ref.feature_keys.values())
    controller.commit_samples([ref], frees=0)
    unused = controller.ack_step([ref.sample_id], 1, 0, True, ()).unused
    assert set(unused) == keys
    for _ in range(2):
        controller.commit_samples([ref], frees=0)  # a sample that somebody else has committed
    assert set(controller.free_keys(unused)) == keys, "the removal was of what was there before"


def test_a_consumer_that_waits_frees_what_a_late_producer_has_put_again(tmp_path: Path):
    """Otherwise the last sample of a source, with the same content, is stale for ever, and both sides wait."""
    controller = controller_of(InMemoryMetadataStore(), Clock())
    first = make_ref(0, random.Random(0))
    last = replace(first, sample_id="last")
    store = open_keyed_store("memory", tmp_path)
    acks = StepAcks(ControlPlane(controller, True), store, lambda step: [first])
    controller.commit_samples([first], frees=0)
    acks.on_step(1)
    acks.confirm()
    controller.commit_samples([first], frees=0)
    stale = controller.commit_samples([last], frees=0)
    assert stale.stale == ("last",)
    acks.confirm()
    again = controller.commit_samples([last], frees=stale.frees)
    assert again.stale == ("last",), "it looked before the removal"
    assert controller.commit_samples([last], frees=again.frees).committed == ("last",)
