"""Control-plane state in an SQLite file, or in the memory of one process with the same statements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from sqlite3 import Connection

from draftworks.features.contracts import SampleRef
from draftworks.stream import sqlite_keys, sqlite_samples, sqlite_tasks
from draftworks.stream.metadata_store import (
    AckedStep,
    AckResult,
    CommitResult,
    ConsumerProgress,
    DeadLetter,
    MetadataStore,
    PromptTask,
    RefPage,
    TaskCounts,
    TaskFailure,
    TaskLease,
    Watermark,
    require_id,
    require_refs,
    require_tasks,
)
from draftworks.stream.sqlite_database import BUSY_TIMEOUT_S, SqliteDatabase


class SQLiteMetadataStore(MetadataStore):
    """State in one file on a local disk, shared by the processes of a host. A call that returned is on the disk.

    Args:
        path: created with its folder if absent.
        busy_timeout_s: how long a call waits for those of other processes.

    Raises:
        StoreError: as `SqliteDatabase`.
    """

    def __init__(self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._database = SqliteDatabase(path, busy_timeout_s)

    def add_tasks(self, run_id: str, tasks: Sequence[PromptTask], max_attempts: int) -> int:
        require_tasks(tasks)
        with self._database.transaction() as db:
            return sqlite_tasks.insert_tasks(db, _require_run(db, run_id), tasks, max_attempts)

    def lease_tasks(
        self,
        run_id: str,
        worker: str,
        limit: int,
        duration_s: float,
        now: float,
        request_id: str,
        max_step: int | None,
        watermark: Watermark | None,
        consumer: str,
    ) -> tuple[TaskLease, ...]:
        require_id(worker, "worker")
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            sqlite_tasks.return_expired(db, run, now)
            room = None
            if watermark is not None:
                number = sqlite_samples.find_consumer(db, run, consumer)
                room = sqlite_tasks.measure_room(db, run, watermark, number)
            return sqlite_tasks.lease_pending(db, run, worker, limit, now + duration_s, request_id, max_step, room)

    def renew_leases(
        self, run_id: str, leases: Sequence[TaskLease], duration_s: float, now: float
    ) -> tuple[TaskLease, ...]:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            sqlite_tasks.return_expired(db, run, now)
            return sqlite_tasks.renew(db, run, leases, now + duration_s)

    def fail_tasks(self, run_id: str, failures: Sequence[TaskFailure], now: float) -> tuple[str, ...]:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            sqlite_tasks.return_expired(db, run, now)
            return sqlite_tasks.fail(db, run, failures)

    def commit_samples(
        self, run_id: str, refs: Sequence[SampleRef], done: Sequence[TaskLease], now: float, frees: int | None
    ) -> CommitResult:
        require_refs(refs)
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            # Content first: the last attempt's, too, ends its task if it comes before anybody has noticed the expiry.
            result = sqlite_samples.insert_refs(db, run, refs, frees)
            again = {ref.source_task_id for ref in refs if ref.sample_id in result.stale}
            sqlite_tasks.finish(db, run, [lease.task for lease in done if lease.task.task_id not in again])
            sqlite_tasks.return_expired(db, run, now)
            return result

    def find_uncommitted(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        with self._database.reading() as db:
            return sqlite_tasks.select_uncommitted(db, _find_run(db, run_id), sample_ids)

    def read_refs(self, run_id: str, cursor: int, limit: int, consumer: str, acked: bool | None, uses: int) -> RefPage:
        with self._database.reading() as db:
            run = _find_run(db, run_id)
            number = sqlite_samples.find_consumer(db, run, consumer)
            return sqlite_samples.select_refs(db, run, cursor, limit, number, acked, uses)

    def ack_samples(
        self,
        run_id: str,
        consumer: str,
        owner: str,
        sample_ids: Sequence[str],
        global_step: int,
        epoch: int,
        now: float,
        release: bool,
        freed: Sequence[str],
    ) -> AckResult:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            number = sqlite_samples.require_consumer(db, run, consumer, owner, now)
            sqlite_keys.confirm(db, run, freed)
            new = sqlite_samples.insert_acks(db, run, number, sample_ids, global_step, epoch, release)
            return AckResult(new, sqlite_keys.select_unused(db, run))

    def read_order(self, run_id: str, consumer: str, after: int, limit: int) -> tuple[AckedStep, ...]:
        with self._database.reading() as db:
            number = sqlite_samples.find_consumer(db, _find_run(db, run_id), consumer)
            return () if number is None else sqlite_samples.select_order(db, number, after, limit)

    def record_checkpoint(self, run_id: str, consumer: str, global_step: int, release: bool) -> None:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            number = sqlite_samples.add_consumer(db, run, consumer)
            db.execute("INSERT OR IGNORE INTO checkpoints VALUES (?, ?)", (number, global_step))
            if release:
                sqlite_samples.release_acked(db, run, number, global_step)

    def free_keys(self, run_id: str, freed: Sequence[str], everything: bool) -> tuple[str, ...]:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            sqlite_keys.confirm(db, run, freed)
            if everything:
                sqlite_keys.drop_uses(db, run)
            return sqlite_keys.select_unused(db, run)

    def record_fact(self, run_id: str, name: str, text: str) -> None:
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (_require_run(db, run_id), name, text))

    def read_facts(self, run_id: str) -> dict[str, str]:
        with self._database.reading() as db:
            return dict(db.execute("SELECT name, text FROM facts WHERE run = ?", (_find_run(db, run_id),)).fetchall())

    def read_progress(self, run_id: str, consumer: str) -> ConsumerProgress:
        with self._database.reading() as db:
            number = sqlite_samples.find_consumer(db, _find_run(db, run_id), consumer)
            return ConsumerProgress() if number is None else sqlite_samples.select_progress(db, number)

    def read_consumers(self, run_id: str) -> dict[str, ConsumerProgress]:
        with self._database.reading() as db:
            return sqlite_samples.select_consumers(db, _find_run(db, run_id))

    def record_left(self, run_id: str, consumer: str, reason: str) -> None:
        require_id(consumer, "consumer")
        with self._database.transaction() as db:
            number = sqlite_samples.add_consumer(db, _require_run(db, run_id), consumer)
            db.execute("INSERT OR REPLACE INTO departures VALUES (?, ?)", (number, reason))

    def rewind(self, run_id: str, consumer: str, owner: str, global_step: int, now: float) -> int:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            number = sqlite_samples.require_consumer(db, run, consumer, owner, now)
            after = (number, global_step)
            db.execute("DELETE FROM checkpoints WHERE consumer = ? AND global_step > ?", after)
            if global_step > 0:
                db.execute("INSERT OR IGNORE INTO checkpoints VALUES (?, ?)", after)
            return sqlite_samples.undo_acks(db, run, number, global_step)

    def requeue_lost(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        with self._database.transaction() as db:
            return sqlite_samples.withdraw(db, _require_run(db, run_id), sample_ids)

    def count_tasks(self, run_id: str, now: float) -> TaskCounts:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            sqlite_tasks.return_expired(db, run, now)
            return sqlite_tasks.count(db, run)

    def read_dead_letters(self, run_id: str) -> tuple[DeadLetter, ...]:
        with self._database.reading() as db:
            return sqlite_tasks.dead_letters(db, _find_run(db, run_id))

    def hold_consumer(self, run_id: str, consumer: str, owner: str, duration_s: float, now: float) -> None:
        require_id(consumer, "consumer")
        require_id(owner, "owner")
        with self._database.transaction() as db:
            number = sqlite_samples.require_consumer(db, _require_run(db, run_id), consumer, owner, now)
            values = (owner, now + duration_s, number)
            db.execute("UPDATE consumers SET owner = ?, expires_at = ? WHERE consumer = ?", values)

    def release_consumer(self, run_id: str, consumer: str, owner: str) -> None:
        with self._database.transaction() as db:
            run = _require_run(db, run_id)
            db.execute(
                "UPDATE consumers SET owner = '', expires_at = 0 WHERE run = ? AND name = ? AND owner = ?",
                (run, consumer, owner),
            )

    def close(self) -> None:
        self._database.close()


class InMemoryMetadataStore(SQLiteMetadataStore):
    """State in the memory of this process: what `SQLiteMetadataStore` means, without its durability."""

    durable = False

    def __init__(self) -> None:
        self._database = SqliteDatabase(None)


def _find_run(db: Connection, run_id: str) -> int:
    """Return a run's number; -1, which no row has, before its first change."""
    row = db.execute("SELECT run FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return -1 if row is None else row[0]


def _require_run(db: Connection, run_id: str) -> int:
    run = _find_run(db, run_id)
    if run < 0:
        require_id(run_id, "run id")
        db.execute("INSERT INTO runs (run_id) VALUES (?)", (run_id,))
        run = _find_run(db, run_id)
    return run
