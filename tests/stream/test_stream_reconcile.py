"""What a restarted consumer has to do over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dataflow_toys import Clock, KeyStore, controller_of, ids_of, open_retaining_store, refs_of, toy_slim_ref, toy_task

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.stream.controller import DataFlowController
from draftworks.stream.step_acks import Reconciliation, free_unused, reconcile_on_restart


def tensors_of(ref: SampleRef) -> dict[str, torch.Tensor]:
    return {name: torch.ones(spec.shape, dtype=torch.bfloat16) for name, spec in ref.feature_specs.items()}


@pytest.fixture(params=["memory", "sqlite"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> DataFlowController:
    """Four tasks of one sample, all captured; s0.0 and s1.0 acknowledged at steps 1 and 2."""
    made = controller_of(open_retaining_store(request.param, tmp_path), Clock())
    made.add_tasks([toy_task(number, samples=1) for number in range(4)])
    for lease in made.lease_tasks("a", 4):
        made.commit_samples(refs_of(lease.task), [lease], lease.frees)
    made.ack(["s0.0"], 1)
    made.ack(["s1.0"], 2)
    return made


@pytest.fixture
def features(controller: DataFlowController) -> KeyStore:
    store = KeyStore()
    for ref in controller.iterate_refs():
        store.put(ref, {})
    return store


def test_acknowledged_and_durable_is_released_and_freed(controller: DataFlowController, features: KeyStore) -> None:
    controller.record_checkpoint(2)
    expected = Reconciliation(("s2.0", "s3.0"), ("s0.0", "s1.0"), 2, True)
    for _ in range(2):
        assert reconcile_on_restart(controller, features, release=True) == expected
        free_unused(controller, features)
        assert features.keys == {f"{each}/{name}" for each in expected.requeued for name in ("hf2", "last")}


def test_acknowledgements_beyond_the_checkpoint_are_undone(controller: DataFlowController, features: KeyStore) -> None:
    controller.record_checkpoint(1)
    found = reconcile_on_restart(controller, features)
    assert found == Reconciliation(("s1.0", "s2.0", "s3.0"), ("s0.0",), 1, False)
    assert controller.ack(["s1.0"], 2) == 1


def test_without_a_checkpoint_everything_is_requeued(controller: DataFlowController, features: KeyStore) -> None:
    found = reconcile_on_restart(controller, features)
    assert found == Reconciliation(("s0.0", "s1.0", "s2.0", "s3.0"), (), 0, False)
    assert len(features.keys) == 8


def test_the_resumed_checkpoint_decides_whatever_was_recorded(
    controller: DataFlowController, features: KeyStore
) -> None:
    controller.record_checkpoint(2)
    assert reconcile_on_restart(controller, features, global_step=1).released == ("s0.0",)
    assert controller.read_progress().checkpoint_step == 1
    # A checkpoint that was complete before it could be recorded counts: training resumed from it.
    controller.ack(["s1.0"], 2)
    assert reconcile_on_restart(controller, features, global_step=2).released == ("s0.0", "s1.0")


def test_what_was_freed_and_is_needed_again_is_captured_again(
    controller: DataFlowController, features: KeyStore
) -> None:
    controller.record_checkpoint(1)
    features.free(["s1.0/hf2", "s0.0/hf2"])
    found = reconcile_on_restart(controller, features)
    assert found == Reconciliation(("s2.0", "s3.0", "s1.0"), ("s0.0",), 1, False, ("s1.0",))
    (lease,) = controller.lease_tasks("b", 9)
    assert lease.task.sample_ids == ("s1.0",)
    controller.commit_samples(refs_of(lease.task), [lease])
    assert ids_of(controller.iterate_refs(acked=False)) == ["s2.0", "s3.0", "s1.0"]


def test_lost_features_that_nothing_can_make_again_end_the_run(
    controller: DataFlowController, features: KeyStore
) -> None:
    controller.commit_samples([toy_slim_ref("live traffic")])
    with pytest.raises(StoreError, match="features of 1 samples .* gone, and no task .* live traffic"):
        reconcile_on_restart(controller, features)


def test_a_key_that_a_requeued_sample_shares_is_kept(controller: DataFlowController, features: KeyStore) -> None:
    twin = toy_slim_ref("twin")
    twin = SampleRef(**{**vars(twin), "feature_keys": {name: f"s0.0/{name}" for name in twin.feature_keys}})
    controller.commit_samples([twin], frees=0)
    controller.record_checkpoint(2)
    assert reconcile_on_restart(controller, features, release=True).released == ("s0.0", "s1.0")
    free_unused(controller, features)
    assert {"s0.0/hf2", "s0.0/last"} <= features.keys
    assert "s1.0/hf2" not in features.keys


def test_a_sample_is_released_after_its_last_use(controller: DataFlowController, features: KeyStore) -> None:
    controller.ack(["s1.0"], 5, epoch=1)
    controller.record_checkpoint(5)
    found = reconcile_on_restart(controller, features, uses=2)
    assert found == Reconciliation(("s0.0", "s2.0", "s3.0"), ("s1.0",), 5, True)


def test_other_keepers_of_the_features_are_left_alone(controller: DataFlowController, features: KeyStore) -> None:
    controller.record_checkpoint(2)
    reconcile_on_restart(controller, features)
    free_unused(controller, features)
    assert len(features.keys) == 8
    features.free(list(features.keys))
    assert reconcile_on_restart(controller, None).recaptured == ()


def test_a_real_content_keyed_store_frees_and_misses_by_key(tmp_path: Path) -> None:
    store = LocalFeatureStore(tmp_path / "features")
    controller = controller_of(open_retaining_store("sqlite", tmp_path), Clock())
    controller.add_tasks([toy_task(number, samples=1) for number in range(3)])
    for lease in controller.lease_tasks("a", 3):
        refs = [store.put(ref, tensors_of(ref)) for ref in refs_of(lease.task)]
        controller.commit_samples(refs, [lease], lease.frees)
    store.flush()
    controller.ack(["s0.0"], 1)
    controller.record_checkpoint(1)
    released, lost, kept = (list(ref.feature_keys.values()) for ref in controller.iterate_refs())
    store.free(lost[:1])
    found = reconcile_on_restart(controller, store, release=True)
    free_unused(controller, store)
    assert found == Reconciliation(("s2.0", "s1.0"), ("s0.0",), 1, True, ("s1.0",))
    assert store.find_missing([*released, *lost, *kept]) == [*released, *lost], "what is left of a lost one goes, too"


def test_a_search_of_ones_own_is_asked(controller: DataFlowController) -> None:
    controller.record_checkpoint(2)
    found = reconcile_on_restart(controller, None, find_lost=lambda refs: [refs[-1].sample_id])
    assert found.recaptured == ("s3.0",)
