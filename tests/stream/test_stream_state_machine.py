"""Random histories of the control plane and a store of features, compared with a plain model after every step."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from dataflow_toys import LEASE_S, Clock, KeyStore, ServedStore, controller_of, ids_of, toy_slim_ref
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import MetadataStore, PromptTask, TaskCounts, TaskLease
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore
from draftworks.stream.step_acks import reconcile_on_restart

MAX_ATTEMPTS = 2
TASKS = 4
SAMPLES = 2
BACK = st.sampled_from((0, 0, 0, 1, 1, 2, 4))
PENDING, LEASED, DONE, DEAD = "pending", "leased", "done", "dead"


@dataclass
class ModelTask:
    """What one task is, in plain words."""

    task: PromptTask
    state: str = PENDING
    attempt: int = 0
    worker: str = ""
    expires_at: float = 0.0
    failures: int = 0

    def count_failure(self) -> None:
        self.failures += 1
        self.state = DEAD if self.failures == MAX_ATTEMPTS else PENDING

    def is_held_by(self, lease: TaskLease) -> bool:
        return (self.state, self.worker, self.attempt) == (LEASED, lease.worker, lease.attempt)


@dataclass
class Model:
    """What the control plane should know."""

    tasks: dict[str, ModelTask] = field(default_factory=dict)
    refs: list[SampleRef] = field(default_factory=list)
    acks: dict[str, int] = field(default_factory=dict)
    checkpoint: int = 0

    @property
    def committed(self) -> dict[str, SampleRef]:
        return {ref.sample_id: ref for ref in self.refs}

    def expire(self, now: float) -> None:
        for task in self.tasks.values():
            if task.state == LEASED and task.expires_at <= now:
                task.count_failure()

    def pending(self) -> list[ModelTask]:
        found = [task for task in self.tasks.values() if task.state == PENDING]
        return sorted(found, key=lambda each: each.task.step)


class ControlPlaneMachine(RuleBasedStateMachine):
    """Producers, a consumer and their accidents."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.model = Model()
        self.features = KeyStore()
        self.versions = 0
        self.step = 0
        self.leases: list[TaskLease] = []
        self.controller = self.connect(self.open_store(Path(self.folder.name)))

    def open_store(self, folder: Path) -> MetadataStore:
        return InMemoryMetadataStore()

    def connect(self, store: MetadataStore) -> DataFlowController:
        return controller_of(store, self.clock, max_attempts=MAX_ATTEMPTS)

    def teardown(self) -> None:
        self.controller.close()
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self.add([0, 1], 1)

    @rule(numbers=st.lists(st.integers(0, TASKS - 1), max_size=3), step=st.integers(0, 2))
    def add(self, numbers: list[int], step: int) -> None:
        tasks = [PromptTask(f"t{n}", "run", tuple(f"s{n}.{p}" for p in range(SAMPLES)), step=step) for n in numbers]
        new = {task.task_id for task in tasks} - set(self.model.tasks)
        assert self.controller.add_tasks(tasks) == len(new)
        for task in tasks:
            self.model.tasks.setdefault(task.task_id, ModelTask(task))

    @rule(seconds=st.sampled_from((1.0, LEASE_S / 2, LEASE_S)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(worker=st.sampled_from("ab"), limit=st.integers(1, 2), max_step=st.none() | st.integers(0, 2))
    def lease(self, worker: str, limit: int, max_step: int | None) -> None:
        self.model.expire(self.clock.now)
        found = self.controller.lease_tasks(worker, limit, max_step)
        expected = [task for task in self.model.pending() if max_step is None or task.task.step <= max_step][:limit]
        for place, task in enumerate(expected):
            if task.failures:  # it is leased alone
                expected = expected[: max(1, place)]
                break
        assert [lease.task for lease in found] == [task.task for task in expected]
        for task, lease in zip(expected, found):
            task.state, task.worker, task.expires_at = LEASED, worker, self.clock.now + LEASE_S
            task.attempt += 1
            assert (lease.attempt, lease.expires_at) == (task.attempt, task.expires_at)
        self.leases += found

    def some_lease(self, back: int) -> TaskLease:
        """A lease that was given, the last ones sooner; it may be over."""
        return self.leases[-1 - back % len(self.leases)]

    @precondition(lambda self: self.leases)
    @rule(back=BACK)
    def renew(self, back: int) -> None:
        lease = self.some_lease(back)
        self.model.expire(self.clock.now)
        task = self.model.tasks[lease.task.task_id]
        held = task.is_held_by(lease)
        assert bool(self.controller.renew_leases([lease])) == held
        if held:
            task.expires_at = self.clock.now + LEASE_S

    @precondition(lambda self: self.leases)
    @rule(back=BACK)
    def fail(self, back: int) -> None:
        lease = self.some_lease(back)
        self.model.expire(self.clock.now)
        task = self.model.tasks[lease.task.task_id]
        held = task.is_held_by(lease)
        if held:
            task.count_failure()
        assert self.controller.fail_task(lease, "no memory") == (held and task.state == DEAD)

    @precondition(lambda self: self.leases)
    @rule(back=BACK, parts=st.sampled_from(((0, 1), (0,), (1,), (1, 0))), done=st.booleans())
    def commit(self, back: int, parts: tuple[int, ...], done: bool) -> None:
        """Under a lease that may be over; whole or in part."""
        lease = self.some_lease(back)
        self.model.expire(self.clock.now)
        task = self.model.tasks[lease.task.task_id]
        self.versions += 1
        refs = [self.capture(lease.task.sample_ids[part], lease.task.task_id) for part in parts]
        result = self.controller.commit_samples(refs, [lease] if done else [])
        before = self.model.committed
        fresh = [] if task.state == DEAD else [ref for ref in refs if ref.sample_id not in before]
        assert list(result.committed) == ids_of(fresh)
        assert list(result.duplicates) == [each for each in ids_of(refs) if each in before]
        self.model.refs += fresh
        if done and task.state != DEAD:
            task.state = DONE

    def capture(self, sample_id: str, task_id: str) -> SampleRef:
        """Put features whose keys tell this capture from all others."""
        ref = toy_slim_ref(sample_id, task_id)
        ref = replace(ref, feature_keys={name: f"{key}#{self.versions}" for name, key in ref.feature_keys.items()})
        return self.features.put(ref, {})

    @precondition(lambda self: len(self.model.acks) < len(self.model.refs))
    @rule(first=st.integers(0, 2), count=st.integers(1, 2))
    def acknowledge(self, first: int, count: int) -> None:
        """One optimizer step over some samples that have not been trained; acknowledged twice, as after a lost answer."""
        waiting = [ref.sample_id for ref in self.model.refs if ref.sample_id not in self.model.acks]
        chosen = waiting[first : first + count]
        self.step += 1
        assert self.controller.ack(chosen, self.step) == len(chosen)
        assert self.controller.ack(chosen, self.step) == 0
        self.model.acks.update(dict.fromkeys(chosen, self.step))

    @precondition(lambda self: self.model.acks)
    @rule(place=st.integers(0, 3), later=st.booleans())
    def train_twice(self, place: int, later: bool) -> None:
        sample_id, step = list(self.model.acks.items())[place % len(self.model.acks)]
        with pytest.raises(StoreError, match="was acknowledged"):
            self.controller.ack([sample_id], step + (1 if later else -1))

    @rule()
    def save(self) -> None:
        self.controller.record_checkpoint(self.step)
        self.model.checkpoint = max(self.model.checkpoint, self.step)

    @precondition(lambda self: self.model.refs)
    @rule(place=st.integers(0, 3))
    def lose_features(self, place: int) -> None:
        self.features.free(self.model.refs[place % len(self.model.refs)].feature_keys.values())

    @rule()
    def crash(self) -> None:
        """Every process of the run is gone; the database is opened anew."""
        self.controller = self.connect(self.reopen())

    def reopen(self) -> MetadataStore:
        return self.controller.store

    @precondition(lambda self: self.model.refs)
    @rule(recorded=st.booleans(), older=st.integers(0, 3))
    def restart(self, recorded: bool, older: int) -> None:
        """The consumer resumes from the recorded checkpoint, or from an older one."""
        step = self.model.checkpoint if recorded else max(self.model.checkpoint - older, 0)
        model = self.model
        durable = max(model.acks.values(), default=0) <= step
        model.acks = {each: at for each, at in model.acks.items() if at <= step}
        model.checkpoint = self.step = step
        dead = [t.task.sample_ids for t in model.tasks.values() if t.state == DEAD]
        lost = [ref for ref in model.refs if ref.sample_id not in model.acks and self.is_lost(ref)]
        hopeless = {ref.sample_id for ref in lost} & {each for ids in dead for each in ids}
        for ref in lost:
            task = model.tasks[ref.source_task_id]
            if ref.sample_id not in hopeless:
                model.refs.remove(ref)
                task.state = PENDING if task.state == DONE else task.state
        if hopeless:
            with pytest.raises(StoreError, match="no task of the run can make them again"):
                reconcile_on_restart(self.controller, self.features, None if recorded else step)
            return
        found = reconcile_on_restart(self.controller, self.features, None if recorded else step)
        assert (found.global_step, found.optimizer_durable) == (step, durable)
        assert list(found.released) == [each for each in ids_of(model.refs) if each in model.acks]
        kept = [each for each in ids_of(model.refs) if each not in model.acks]
        assert list(found.requeued) == [*kept, *ids_of(lost)]
        assert list(found.recaptured) == ids_of(lost)
        assert not any(self.is_lost(ref) for ref in model.refs if ref.sample_id not in model.acks)
        held = {key for ref in model.refs if ref.sample_id in model.acks for key in ref.feature_keys.values()}
        assert held.isdisjoint(self.features.keys)

    def is_lost(self, ref: SampleRef) -> bool:
        return bool(self.features.find_missing(ref.feature_keys.values()))

    @invariant()
    def references_are_those_of_the_model_in_its_order(self) -> None:
        assert list(self.controller.iterate_refs()) == self.model.refs
        acked = [ref for ref in self.model.refs if ref.sample_id in self.model.acks]
        assert list(self.controller.iterate_refs(acked=True)) == acked

    @invariant()
    def tasks_are_in_the_states_of_the_model(self) -> None:
        self.model.expire(self.clock.now)
        states = [task.state for task in self.model.tasks.values()]
        expected = TaskCounts(*(states.count(state) for state in (PENDING, LEASED, DONE, DEAD)))
        assert self.controller.count_tasks() == expected
        letters = {letter.task.task_id: letter for letter in self.controller.read_dead_letters()}
        assert set(letters) == {name for name, task in self.model.tasks.items() if task.state == DEAD}
        for letter in letters.values():
            assert len(letter.reasons) == MAX_ATTEMPTS
            lost = [each for each in letter.task.sample_ids if each not in self.model.committed]
            assert list(letter.lost_samples) == lost


class SQLiteMachine(ControlPlaneMachine):
    """The same over a file, which is closed and opened again by a crash."""

    def open_store(self, folder: Path) -> MetadataStore:
        self.path = folder / "plane.db"
        return SQLiteMetadataStore(self.path)

    def reopen(self) -> MetadataStore:
        self.controller.close()
        return SQLiteMetadataStore(self.path)


class ServedMachine(ControlPlaneMachine):
    """The same over a socket; a crash is one of the server, which is started again on its port."""

    def open_store(self, folder: Path) -> MetadataStore:
        return ServedStore(InMemoryMetadataStore(), self.clock)

    def reopen(self) -> MetadataStore:
        store = self.controller.store
        assert isinstance(store, ServedStore)
        store.restart()
        return store


TestInMemory = ControlPlaneMachine.TestCase
TestSQLite = SQLiteMachine.TestCase
TestServed = ServedMachine.TestCase
TestServed.settings = settings(max_examples=10)
