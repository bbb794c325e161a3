"""One contract for every metadata store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dataflow_toys import (
    LEASE_S,
    Clock,
    ServedStore,
    controller_of,
    ids_of,
    open_retaining_store,
    refs_of,
    superseded,
    toy_slim_ref,
    toy_task,
)

from draftworks.errors import StoreError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import (
    ConsumerProgress,
    MetadataStore,
    PromptTask,
    TaskCounts,
    TaskFailure,
    TaskLease,
    Watermark,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "served"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[MetadataStore]:
    if request.param == "served":
        opened = ServedStore(open_retaining_store("sqlite", tmp_path), clock)
    else:
        opened = open_retaining_store(request.param, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def controller(store: MetadataStore, clock: Clock) -> DataFlowController:
    return controller_of(store, clock)


def test_tasks_are_added_once_and_leased_by_step_then_age(controller: DataFlowController) -> None:
    tasks = [toy_task(0, step=2), toy_task(1, step=1), toy_task(2, step=1), toy_task(3, step=9)]
    assert controller.add_tasks(tasks) == 4
    assert controller.add_tasks([replace(tasks[0], step=0), toy_task(4, step=9)]) == 1
    assert [lease.task for lease in controller.lease_tasks("a", 9, max_step=2)] == [tasks[1], tasks[2], tasks[0]]
    assert controller.lease_tasks("a", 9, max_step=2) == ()
    assert controller.count_tasks() == TaskCounts(pending=2, leased=3)
    assert controller.count_tasks().open == 5


def test_a_repeated_lease_request_gets_the_same_leases(store: MetadataStore, controller: DataFlowController) -> None:
    controller.add_tasks([toy_task(number) for number in range(4)])
    first = store.lease_tasks("run", "a", 2, LEASE_S, 1000.0, "request", None, None, "trainer")
    assert len(first) == 2
    assert store.lease_tasks("run", "a", 2, LEASE_S, 1001.0, "request", None, None, "trainer") == first
    assert [lease.task.task_id for lease in controller.lease_tasks("b", 9)] == ["t2", "t3"]


def test_leases_last_until_they_expire_and_renewing_extends_them(controller: DataFlowController, clock: Clock) -> None:
    controller.add_tasks([toy_task(0), toy_task(1)])
    kept, lost = controller.lease_tasks("a", 2)
    clock.now += LEASE_S - 1
    assert controller.lease_tasks("b") == ()
    (renewed,) = controller.renew_leases([kept])
    assert renewed.expires_at == clock.now + LEASE_S
    clock.now += 1
    (taken,) = controller.lease_tasks("b", 2)
    assert (taken.task, taken.worker, taken.attempt) == (lost.task, "b", 2)
    assert controller.renew_leases([kept, lost]) == (replace(kept, expires_at=clock.now + LEASE_S),)


def test_failures_and_expiries_count_attempts_until_the_dead_letter(
    controller: DataFlowController, clock: Clock
) -> None:
    task = toy_task(0)
    controller.add_tasks([task])
    (first,) = controller.lease_tasks("a")
    assert not controller.fail_task(first, "no memory")
    controller.lease_tasks("b")
    clock.now += LEASE_S
    (third,) = controller.lease_tasks("c")
    assert not controller.fail_task(first, "said twice")
    controller.commit_samples(refs_of(task)[:1])
    assert controller.fail_task(third, "no memory again")
    assert not controller.fail_task(third, "no memory again")
    (letter,) = controller.read_dead_letters()
    assert letter.task == task
    assert letter.lost_samples == task.sample_ids[1:]
    for reason, parts in zip(letter.reasons, [("1", "a", "no memory"), ("2", "b", "expired"), ("3", "c", "again")]):
        assert all(part in reason for part in parts)
    assert controller.lease_tasks("d", 9) == ()
    assert controller.count_tasks() == TaskCounts(dead=1)


def test_content_of_a_dead_task_is_refused(controller: DataFlowController, store: MetadataStore, clock: Clock) -> None:
    once = controller_of(store, clock, max_attempts=1)
    once.add_tasks([toy_task(0)])
    (lease,) = once.lease_tasks("a")
    clock.now += LEASE_S
    assert once.count_tasks() == TaskCounts(dead=1)
    refs = refs_of(lease.task)
    result = once.commit_samples(refs, [lease])
    assert (result.committed, result.refused) == ((), lease.task.sample_ids)
    assert once.read_refs().refs == ()
    assert once.count_tasks() == TaskCounts(dead=1)


def test_commit_is_once_per_sample_and_ends_the_task(controller: DataFlowController) -> None:
    controller.add_tasks([toy_task(0)])
    (lease,) = controller.lease_tasks("a")
    refs = refs_of(lease.task)
    assert controller.find_uncommitted(lease.task.sample_ids) == lease.task.sample_ids
    assert controller.commit_samples(refs, [lease]).committed == lease.task.sample_ids
    again = controller.commit_samples([superseded(ref) for ref in refs], [lease])
    assert (again.committed, again.duplicates) == ((), lease.task.sample_ids)
    assert controller.read_refs().refs == tuple(refs)
    assert controller.find_uncommitted(lease.task.sample_ids) == ()
    assert controller.count_tasks() == TaskCounts(done=1)
    assert not controller.fail_task(lease, "too late")


def test_commit_under_an_expired_lease_is_content_and_ends_the_task_for_all(
    controller: DataFlowController, clock: Clock
) -> None:
    controller.add_tasks([toy_task(0)])
    (slow,) = controller.lease_tasks("slow")
    clock.now += LEASE_S
    (quick,) = controller.lease_tasks("quick")
    assert controller.commit_samples(refs_of(slow.task), [slow]).committed == slow.task.sample_ids
    assert controller.renew_leases([quick]) == ()
    assert controller.commit_samples(refs_of(slow.task), [quick]).duplicates == slow.task.sample_ids
    assert controller.count_tasks() == TaskCounts(done=1)


def test_late_content_of_the_last_attempt_counts_if_nobody_has_noticed_the_expiry(
    store: MetadataStore, clock: Clock
) -> None:
    once = controller_of(store, clock, max_attempts=1)
    once.add_tasks([toy_task(0), toy_task(1)])
    late, lost = once.lease_tasks("a", 2)
    clock.now += LEASE_S
    assert once.commit_samples(refs_of(late.task), [late]).committed == late.task.sample_ids
    assert once.count_tasks() == TaskCounts(done=1, dead=1)
    assert [letter.task for letter in once.read_dead_letters()] == [lost.task]


def test_a_task_of_which_a_sample_is_withdrawn_before_its_other_one_is_committed_is_made_again(
    controller: DataFlowController, clock: Clock
) -> None:
    controller.add_tasks([toy_task(0)])
    (lease,) = controller.lease_tasks("a")
    first, second = refs_of(lease.task)
    controller.commit_samples([first])
    assert controller.requeue_lost([first.sample_id]) == ()
    assert controller.commit_samples([second], [lease]).committed == (second.sample_id,)
    assert controller.count_tasks() == TaskCounts(pending=1)
    (again,) = controller.lease_tasks("b")
    assert controller.commit_samples([first, second], [again]).committed == (first.sample_id,)
    assert controller.count_tasks() == TaskCounts(done=1)


def test_a_commit_that_fails_changes_nothing(controller: DataFlowController) -> None:
    controller.add_tasks([toy_task(0)])
    (lease,) = controller.lease_tasks("a")
    unknown = replace(lease, task=toy_task(99))
    with pytest.raises(StoreError, match="t99"):
        controller.commit_samples(refs_of(lease.task), [lease, unknown])
    assert controller.read_refs().refs == ()
    assert controller.count_tasks() == TaskCounts(leased=1)


def test_references_come_in_commit_order_by_cursor(controller: DataFlowController) -> None:
    refs = [toy_slim_ref(f"s{number % 7}.{number}", tokens=3 + number % 4) for number in range(25)]
    controller.commit_samples(refs[:11])
    controller.commit_samples(refs[9:])
    found, cursor = [], 0
    while (page := controller.read_refs(cursor, 4)).refs:
        found += page.refs
        cursor = page.cursor
    assert found == refs == list(controller.iterate_refs())
    assert controller.read_refs(cursor) == page
    controller.commit_samples([toy_slim_ref("late")])
    assert ids_of(controller.read_refs(cursor).refs) == ["late"]


def test_acknowledgements_are_idempotent_and_never_count_twice(controller: DataFlowController) -> None:
    controller.commit_samples([toy_slim_ref(name) for name in "abcd"])
    assert controller.ack(["a", "b"], 1) == 2
    assert controller.ack(["a", "b"], 1) == 0
    with pytest.raises(StoreError, match="sample b was acknowledged at step 1"):
        controller.ack(["c", "b"], 2)
    with pytest.raises(StoreError, match="sample x"):
        controller.ack(["c", "x"], 2)
    assert ids_of(controller.read_refs(acked=False).refs) == ["c", "d"]
    assert controller.ack(["a"], 2, epoch=1) == 1
    assert ids_of(controller.read_refs(acked=True).refs) == ["a", "b"]
    assert ids_of(controller.read_refs(acked=True, uses=2).refs) == ["a"]
    assert controller.read_progress().acked_step == 2


def test_consumers_acknowledge_apart(store: MetadataStore, clock: Clock) -> None:
    first, second = (controller_of(store, clock, consumer=name) for name in ("first", "second"))
    first.commit_samples([toy_slim_ref("a"), toy_slim_ref("b")])
    assert first.ack(["a"], 1) == second.ack(["a"], 7) == 1
    second.ack(["b"], 8)
    assert ids_of(first.read_refs(acked=False).refs) == ["b"]
    assert second.read_refs(acked=False).refs == ()
    assert (first.read_progress().acked_step, second.read_progress().acked_step) == (1, 8)


def test_consumers_leave_and_take_part_again(store: MetadataStore, clock: Clock) -> None:
    first, second = (controller_of(store, clock, consumer=name) for name in ("first", "second"))
    assert first.read_consumers() == {}
    first.commit_samples([toy_slim_ref("a")])
    first.ack(["a"], 1)
    first.record_left("it has failed", "second")
    assert first.read_consumers() == {"first": ConsumerProgress(1), "second": ConsumerProgress(left="it has failed")}
    second.record_left("")
    second.record_checkpoint(4)
    assert second.read_progress() == ConsumerProgress(0, 4)
    assert second.read_progress().done_step == 4


def test_a_sample_committed_by_its_consumer_first_can_still_be_made_again(controller: DataFlowController) -> None:
    controller.add_tasks([PromptTask("task", controller.run_id, ("a",))])
    (lease,) = controller.lease_tasks("worker")
    ref = toy_slim_ref("a")
    controller.commit_samples([replace(ref, source_task_id="nobody's")])
    assert controller.requeue_lost(["a"]) == ("a",)
    assert controller.commit_samples([replace(ref, source_task_id="task")], [lease]).duplicates == ("a",)
    assert controller.requeue_lost(["a"]) == ()
    assert controller.count_tasks().pending == 1


def test_rewind_undoes_what_no_checkpoint_covers(controller: DataFlowController) -> None:
    controller.commit_samples([toy_slim_ref(name) for name in "abc"])
    for step, name in enumerate("abc", start=1):
        controller.ack([name], step)
        controller.record_checkpoint(step)
    assert controller.read_progress().checkpoint_step == 3
    assert controller.rewind(1) == 2
    assert controller.rewind(1) == 0
    assert (controller.read_progress().acked_step, controller.read_progress().checkpoint_step) == (1, 1)
    assert ids_of(controller.read_refs(acked=False).refs) == ["b", "c"]
    assert controller.ack(["b"], 2) == 1


def test_lost_features_are_made_again_and_come_after_all_others(controller: DataFlowController) -> None:
    controller.add_tasks([toy_task(0)])
    (lease,) = controller.lease_tasks("a")
    first, second = refs_of(lease.task)
    controller.commit_samples([first, second, toy_slim_ref("no task")], [lease])
    controller.ack([first.sample_id], 1)
    cursor = controller.read_refs().cursor
    assert controller.requeue_lost([first.sample_id, "no task", "unknown"]) == ("no task",)
    assert controller.requeue_lost([first.sample_id]) == ()
    assert ids_of(controller.iterate_refs()) == [second.sample_id, "no task"]
    (again,) = controller.lease_tasks("b")
    assert again.task == lease.task
    assert controller.find_uncommitted(again.task.sample_ids) == (first.sample_id,)
    made = superseded(first)
    assert controller.commit_samples([made, second], [again]).committed == (first.sample_id,)
    assert controller.read_refs(cursor).refs == (made,)
    assert ids_of(controller.read_refs(acked=True).refs) == [first.sample_id]


def test_two_consumers_with_one_identity_are_refused(store: MetadataStore, clock: Clock) -> None:
    first, second = controller_of(store, clock), controller_of(store, clock)
    first.commit_samples([toy_slim_ref("a")])
    first.hold_consumer()
    first.hold_consumer()
    for refused in (second.hold_consumer, lambda: second.ack(["a"], 1), lambda: second.rewind(0)):
        with pytest.raises(StoreError, match="consumer trainer is held by .* another 10 s"):
            refused()
    second.release_consumer()
    clock.now += LEASE_S - 1
    first.hold_consumer()
    clock.now += LEASE_S - 1
    with pytest.raises(StoreError):
        second.hold_consumer()
    clock.now += 1
    second.hold_consumer()
    with pytest.raises(StoreError):
        first.ack(["a"], 1)
    second.release_consumer()
    assert first.ack(["a"], 1) == 1


def test_runs_of_one_store_are_apart(store: MetadataStore, clock: Clock) -> None:
    here, there = (DataFlowController(name, store, clock) for name in ("here", "there"))
    assert here.add_tasks([toy_task(0)]) == there.add_tasks([toy_task(0)]) == 1
    here.commit_samples([toy_slim_ref("a")])
    here.ack(["a"], 1)
    assert there.read_refs().refs == ()
    assert there.commit_samples([toy_slim_ref("a")]).committed == ("a",)
    assert ids_of(there.read_refs(acked=False).refs) == ["a"]


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 513, "\ud800", 7])
def test_ids_that_are_none_are_refused(controller: DataFlowController, bad: str) -> None:
    with pytest.raises(StoreError, match="expected text"):
        controller.commit_samples([toy_slim_ref("a"), replace(toy_slim_ref("b"), sample_id=bad)])
    with pytest.raises(StoreError, match="expected text"):
        controller.add_tasks([PromptTask(bad, "run")])
    assert controller.read_refs().refs == ()


def test_no_tensor_enters_the_control_plane(controller: DataFlowController) -> None:
    tensor = torch.ones(())
    with pytest.raises(TypeError, match=r"refs\[1\].num_tokens is a Tensor"):
        controller.commit_samples([toy_slim_ref("a"), replace(toy_slim_ref("b"), num_tokens=tensor)])
    with pytest.raises(TypeError, match="carries no tensors"):
        controller.add_tasks([PromptTask("t", "run", metadata={"hidden": [tensor]})])
    assert controller.read_refs().refs == ()


def test_a_task_that_is_given_back_unbegun_has_no_attempt_more(controller: DataFlowController) -> None:
    controller.add_tasks([toy_task(0)])
    for number in range(5):
        (lease,) = controller.lease_tasks(f"w{number}")
        assert lease.failures == 0
        assert controller.fail_tasks([TaskFailure(lease, "told to stop", counts=False)]) == ()
    assert controller.count_tasks() == TaskCounts(pending=1)


def test_a_task_of_which_an_attempt_failed_is_leased_alone(controller: DataFlowController) -> None:
    """It may be the one that kills its worker, with all that is leased beside it."""
    controller.add_tasks([toy_task(number) for number in range(4)])
    leases = controller.lease_tasks("a", 2)
    controller.fail_tasks([TaskFailure(lease, "died") for lease in leases])
    assert [lease.task.task_id for lease in controller.lease_tasks("b", 9)] == ["t0"]
    assert [lease.failures for lease in controller.lease_tasks("c", 9)] == [1]
    assert [lease.task.task_id for lease in controller.lease_tasks("d", 9)] == ["t2", "t3"]


def test_the_watermark_counts_what_is_leased_and_what_is_committed_and_not_acknowledged(
    controller: DataFlowController,
) -> None:
    watermark = Watermark(samples=4, bytes=800)
    controller.add_tasks([replace(toy_task(number), size=(2, 300)) for number in range(6)])

    def lease() -> list[str]:
        leases.extend(found := controller.lease_tasks("a", 9, watermark=watermark))
        return [each.task.task_id for each in found]

    leases: list[TaskLease] = []
    assert (lease(), lease()) == (["t0", "t1"], [])
    for each in leases[:2]:
        assert controller.commit_samples(refs_of(each.task), [each]).committed
    assert lease() == []
    controller.ack(leases[0].task.sample_ids, 1)
    assert lease() == ["t2"]
    controller.rewind(0)
    controller.commit_samples(refs_of(leases[2].task), [leases[2]])
    assert lease() == []
    controller.ack([ref.sample_id for ref in controller.iterate_refs()], 1)
    assert lease() == ["t3", "t4"]


def test_what_each_step_took_is_read_in_order(controller: DataFlowController) -> None:
    names = [f"s{number}" for number in range(9)]
    controller.commit_samples([toy_slim_ref(name) for name in names])
    steps = [("s3", "s1", "s2"), ("s0", "s8", "s4")]
    for number, samples in enumerate(steps, 1):
        controller.ack(samples, number)
    assert [(step.step, step.sample_ids) for step in controller.read_order()] == list(enumerate(steps, 1))
    controller.rewind(1)
    assert [step.sample_ids for step in controller.read_order()] == steps[:1]


def test_facts_of_a_run_are_read_by_all(controller: DataFlowController) -> None:
    assert controller.read_facts() == {}
    controller.record_fact("source", "one")
    controller.record_fact("source", "two")
    assert (controller.read_facts(), controller.of_run("other").read_facts()) == ({"source": "two"}, {})
