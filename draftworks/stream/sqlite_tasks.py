"""SQL of tasks, leases and dead letters. Every function works inside the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from sqlite3 import Connection
from typing import Any

from draftworks.errors import StoreError
from draftworks.stream.metadata_store import (
    DeadLetter,
    InFlight,
    PromptTask,
    TaskCounts,
    TaskFailure,
    TaskLease,
    Watermark,
)

PENDING, LEASED, DONE, DEAD = range(4)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def insert_tasks(db: Connection, run: int, tasks: Sequence[PromptTask], max_attempts: int) -> int:
    """Insert tasks whose ids are new; return how many."""
    before = db.total_changes
    db.executemany(
        "INSERT OR IGNORE INTO tasks (run, task_id, step, state, max_attempts, body) VALUES (?, ?, ?, ?, ?, ?)",
        ((run, task.task_id, task.step, PENDING, max_attempts, _encode(asdict(task))) for task in tasks),
    )
    return db.total_changes - before


def return_expired(db: Connection, run: int, now: float) -> None:
    """Return tasks whose lease is over at `now` to the pool, or to the dead letters after their last attempt."""
    rows = db.execute(
        "SELECT task, worker, attempt FROM tasks WHERE run = ? AND state = ? AND expires_at <= ? ORDER BY task",
        (run, LEASED, now),
    ).fetchall()
    for task, worker, attempt in rows:
        _count_failure(db, task, f"attempt {attempt}: the lease of {worker} expired")


def lease_pending(
    db: Connection,
    run: int,
    worker: str,
    limit: int,
    expires_at: float,
    request_id: str,
    max_step: int | None,
    room: InFlight | None,
) -> tuple[TaskLease, ...]:
    """Lease pending tasks by step and age, as many as have room; the same ones again for a repeated request."""
    (frees,) = db.execute("SELECT frees FROM runs WHERE run = ?", (run,)).fetchone()
    columns = "SELECT task, body, attempt, reasons, expires_at FROM tasks"
    again = db.execute(
        f"{columns} WHERE run = ? AND state = ? AND worker = ? AND request = ? ORDER BY step, task",
        (run, LEASED, worker, request_id),
    ).fetchall()
    pending = db.execute(
        f"{columns} WHERE run = ? AND state = ? AND step <= ? ORDER BY step, task LIMIT ?",
        (run, PENDING, 2**62 if max_step is None else max_step, 0 if again else limit),
    ).fetchall()
    leases = [
        TaskLease(_task(body), worker, attempt, until, len(json.loads(reasons)), frees)
        for _, body, attempt, reasons, until in again
    ]
    for task, body, attempt, reasons, _ in pending:
        lease = TaskLease(_task(body), worker, attempt + 1, expires_at, len(json.loads(reasons)), frees)
        if room is not None:
            room -= InFlight(*(lease.task.size or (0, 0)))
            if room.samples < 0 or room.bytes < 0:
                break
        if leases and lease.failures:
            break  # it may be the one that kills its worker, so it is leased alone
        db.execute(
            "UPDATE tasks SET state = ?, attempt = ?, worker = ?, request = ?, expires_at = ? WHERE task = ?",
            (LEASED, attempt + 1, worker, request_id, expires_at, task),
        )
        leases.append(lease)
        if lease.failures:
            break
    return tuple(leases)


def measure_room(db: Connection, run: int, watermark: Watermark, consumer: int | None) -> InFlight:
    """Return what may be leased beside what is leased, or committed and not acknowledged by the consumer."""
    rows = db.execute("SELECT body FROM tasks WHERE run = ? AND state = ?", (run, LEASED)).fetchall()
    sizes = [InFlight(*(_task(body).size or (0, 0))) for (body,) in rows]
    committed = InFlight(*db.execute("SELECT samples, bytes FROM runs WHERE run = ?", (run,)).fetchone())
    row = db.execute("SELECT samples, bytes FROM consumers WHERE consumer = ?", (consumer,)).fetchone()
    taken = sum(sizes, committed - InFlight(*(row or (0, 0))))
    none = 2**62
    return InFlight(watermark.samples or none, watermark.bytes or none) - taken


def renew(db: Connection, run: int, leases: Sequence[TaskLease], expires_at: float) -> tuple[TaskLease, ...]:
    """Extend the leases that are still held."""
    held = []
    for lease in leases:
        task = _held_task(db, run, lease)
        if task is not None:
            db.execute("UPDATE tasks SET expires_at = ? WHERE task = ?", (expires_at, task))
            held.append(replace(lease, expires_at=expires_at))
    return tuple(held)


def fail(db: Connection, run: int, failures: Sequence[TaskFailure]) -> tuple[str, ...]:
    """Count failures under held leases; return the ids of tasks that are dead by them."""
    dead = []
    for failure in failures:
        task = _held_task(db, run, failure.lease)
        reason = f"attempt {failure.lease.attempt}: {failure.lease.worker}: {failure.reason}"
        if task is None:
            continue
        if not failure.counts:
            db.execute("UPDATE tasks SET state = ? WHERE task = ?", (PENDING, task))
        elif _count_failure(db, task, reason):
            dead.append(failure.lease.task.task_id)
    return tuple(dead)


def finish(db: Connection, run: int, tasks: Sequence[PromptTask]) -> None:
    """Mark tasks as done, whoever holds their lease. Dead ones stay dead; an unknown one is a StoreError.

    One is pending again if the reference of a sample was withdrawn while another of its samples was captured again.
    """
    for task in tasks:
        if find_state(db, run, task.task_id) is None:
            raise StoreError(
                f"task {task.task_id} is unknown to the control plane: expected one that was added to this run"
            )
        withdrawn = "SELECT 1 FROM samples WHERE run = ? AND sample_id = ? AND seq IS NULL"
        again = any(db.execute(withdrawn, (run, each)).fetchone() for each in task.sample_ids)
        db.execute(
            "UPDATE tasks SET state = ? WHERE run = ? AND task_id = ? AND state != ?",
            (PENDING if again else DONE, run, task.task_id, DEAD),
        )


def find_state(db: Connection, run: int, task_id: str) -> int | None:
    """Return a task's state; None if the run has no such task."""
    row = db.execute("SELECT state FROM tasks WHERE run = ? AND task_id = ?", (run, task_id)).fetchone()
    return None if row is None else row[0]


def reopen(db: Connection, run: int, task_id: str) -> bool:
    """Return a done task to the pool; False if there is no such task, or it is dead."""
    if find_state(db, run, task_id) in (None, DEAD):
        return False
    db.execute("UPDATE tasks SET state = ? WHERE run = ? AND task_id = ? AND state = ?", (PENDING, run, task_id, DONE))
    return True


def count(db: Connection, run: int) -> TaskCounts:
    """Return the tasks in each state."""
    found = dict(db.execute("SELECT state, count(*) FROM tasks WHERE run = ? GROUP BY state", (run,)).fetchall())
    return TaskCounts(found.get(PENDING, 0), found.get(LEASED, 0), found.get(DONE, 0), found.get(DEAD, 0))


def dead_letters(db: Connection, run: int) -> tuple[DeadLetter, ...]:
    """Return dead tasks with their reasons and the samples that they never gave."""
    rows = db.execute(
        "SELECT body, reasons FROM tasks WHERE run = ? AND state = ? ORDER BY task", (run, DEAD)
    ).fetchall()
    letters = []
    for body, reasons in rows:
        task = _task(body)
        letters.append(DeadLetter(task, tuple(json.loads(reasons)), select_uncommitted(db, run, task.sample_ids)))
    return tuple(letters)


def select_uncommitted(db: Connection, run: int, sample_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the samples without a committed reference, in the order given."""
    query = "SELECT 1 FROM samples WHERE run = ? AND sample_id = ? AND seq IS NOT NULL"
    return tuple(each for each in sample_ids if db.execute(query, (run, each)).fetchone() is None)


def _held_task(db: Connection, run: int, lease: TaskLease) -> int | None:
    row = db.execute(
        "SELECT task FROM tasks WHERE run = ? AND task_id = ? AND state = ? AND worker = ? AND attempt = ?",
        (run, lease.task.task_id, LEASED, lease.worker, lease.attempt),
    ).fetchone()
    return None if row is None else row[0]


def _count_failure(db: Connection, task: int, reason: str) -> bool:
    """Write a reason down; return whether it was that of the last attempt."""
    text, most = db.execute("SELECT reasons, max_attempts FROM tasks WHERE task = ?", (task,)).fetchone()
    reasons = [*json.loads(text), reason]
    dead = len(reasons) >= most
    db.execute(
        "UPDATE tasks SET state = ?, reasons = ? WHERE task = ?", (DEAD if dead else PENDING, _encode(reasons), task)
    )
    return dead


def _task(body: str) -> PromptTask:
    fields: dict[str, Any] = json.loads(body)
    size = fields.get("size")
    return PromptTask(**{**fields, "sample_ids": tuple(fields["sample_ids"]), "size": size and tuple(size)})
