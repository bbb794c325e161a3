"""SQL of committed references, acknowledgements and consumers. Every function works inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from draftworks.dataflow.metadata_store import CommitResult, ConsumerProgress, RefPage
from draftworks.dataflow.ref_set import RefEncoder, decode_ref
from draftworks.dataflow.sqlite_tasks import DEAD, find_state, reopen
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef


def insert_refs(db: Connection, run: int, refs: Sequence[SampleRef]) -> CommitResult:
    """Commit references of samples that have none, after all that are committed; refuse those of dead tasks."""
    encoder, ref_sets = RefEncoder(), {}
    committed, duplicates, refused = [], [], []
    dead = {task_id for task_id in {ref.source_task_id for ref in refs} if find_state(db, run, task_id) == DEAD}
    (seq,) = db.execute("SELECT next_seq FROM runs WHERE run = ?", (run,)).fetchone()
    for ref in refs:
        slim = encoder.encode(ref)
        if ref.source_task_id in dead:
            (duplicates if _is_committed(db, run, ref.sample_id) else refused).append(ref.sample_id)
            continue
        if slim.header not in ref_sets:
            ref_sets[slim.header] = _find_or_insert_header(db, slim.header)
        values = (run, ref.sample_id, seq, ref_sets[slim.header], slim.line, ref.source_task_id)
        changed = db.execute(
            "INSERT INTO samples (run, sample_id, seq, ref_set, line, task_id) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run, sample_id) DO UPDATE SET seq = excluded.seq, ref_set = excluded.ref_set, "
            "line = excluded.line, task_id = excluded.task_id WHERE seq IS NULL",
            values,
        ).rowcount
        (committed if changed else duplicates).append(ref.sample_id)
        seq += bool(changed)
        if not changed:
            _name_task(db, run, ref)
    db.execute("UPDATE runs SET next_seq = ? WHERE run = ?", (seq, run))
    return CommitResult(tuple(committed), tuple(duplicates), tuple(refused))


def select_refs(
    db: Connection, run: int, cursor: int, limit: int, consumer: int | None, acked: bool | None, uses: int
) -> RefPage:
    """Return the page after `cursor`; `consumer` None is one that has acknowledged nothing yet."""
    where, values = "", [run, cursor]
    if acked is not None:
        sign = ">=" if acked else "<"
        where = f"AND (SELECT count(*) FROM acks WHERE consumer = ? AND acks.sample = samples.sample) {sign} ?"
        values += [-1 if consumer is None else consumer, uses]
    rows = db.execute(
        "SELECT seq, header, line FROM samples JOIN ref_sets USING (ref_set) "
        f"WHERE run = ? AND seq > ? {where} ORDER BY seq LIMIT ?",
        (*values, limit),
    ).fetchall()
    refs = tuple(decode_ref(header, line) for _, header, line in rows)
    return RefPage(refs, rows[-1][0] if rows else cursor)


def insert_acks(
    db: Connection, run: int, consumer: int, sample_ids: Sequence[str], global_step: int, epoch: int
) -> int:
    """Acknowledge samples; a StoreError for an unknown one, or one of this epoch acknowledged at another step."""
    new = 0
    for sample_id in sample_ids:
        row = db.execute(
            "SELECT samples.sample, seq, global_step FROM samples "
            "LEFT JOIN acks ON acks.consumer = ? AND acks.sample = samples.sample AND acks.epoch = ? "
            "WHERE run = ? AND sample_id = ?",
            (consumer, epoch, run, sample_id),
        ).fetchone()
        if row is None or (row[1] is None and row[2] is None):
            raise StoreError(
                f"sample {sample_id} cannot be acknowledged at step {global_step}: no reference of it is committed"
            )
        sample, _, step = row
        if step is None:
            db.execute("INSERT INTO acks VALUES (?, ?, ?, ?)", (consumer, sample, epoch, global_step))
            new += 1
        elif step != global_step:
            raise StoreError(
                f"sample {sample_id} was acknowledged at step {step} of epoch {epoch}, and is again at step "
                f"{global_step}: it would count twice. After a restart, reconcile before training goes on"
            )
    return new


def withdraw(db: Connection, run: int, sample_ids: Sequence[str]) -> tuple[str, ...]:
    """Withdraw references and reopen their tasks; return the samples whose task cannot make them again."""
    hopeless = []
    for sample_id in sample_ids:
        row = db.execute(
            "SELECT sample, task_id FROM samples WHERE run = ? AND sample_id = ? AND seq IS NOT NULL", (run, sample_id)
        ).fetchone()
        if row is None:
            continue
        if reopen(db, run, row[1]):
            db.execute("UPDATE samples SET seq = NULL WHERE sample = ?", (row[0],))
        else:
            hopeless.append(sample_id)
    return tuple(hopeless)


def find_consumer(db: Connection, run: int, name: str) -> int | None:
    """Return a consumer's number; None before its first call."""
    row = db.execute("SELECT consumer FROM consumers WHERE run = ? AND name = ?", (run, name)).fetchone()
    return None if row is None else row[0]


def require_consumer(db: Connection, run: int, name: str, owner: str, now: float) -> int:
    """Return a consumer's number, made if new. Raises StoreError if another process holds the identity at `now`."""
    db.execute("INSERT OR IGNORE INTO consumers (run, name) VALUES (?, ?)", (run, name))
    consumer, holder, expires_at = db.execute(
        "SELECT consumer, owner, expires_at FROM consumers WHERE run = ? AND name = ?", (run, name)
    ).fetchone()
    if holder not in ("", owner) and expires_at > now:
        raise StoreError(
            f"consumer {name} is held by {holder} for another {expires_at - now:.0f} s: two consumers with one identity "
            "would each train a part. Stop the other one, or give this one another name; the hold of a process that is "
            "gone ends by itself"
        )
    return consumer


def select_progress(db: Connection, consumer: int) -> ConsumerProgress:
    """Return the last acknowledged step, the last checkpoint, 0 for none, and why the consumer has left."""
    (acked,) = db.execute("SELECT max(global_step) FROM acks WHERE consumer = ?", (consumer,)).fetchone()
    (saved,) = db.execute("SELECT max(global_step) FROM checkpoints WHERE consumer = ?", (consumer,)).fetchone()
    left = db.execute("SELECT reason FROM departures WHERE consumer = ?", (consumer,)).fetchone()
    return ConsumerProgress(acked or 0, saved or 0, "" if left is None else left[0])


def select_consumers(db: Connection, run: int) -> dict[str, ConsumerProgress]:
    """Return the progress of every consumer of a run, by name."""
    rows = db.execute("SELECT name, consumer FROM consumers WHERE run = ?", (run,)).fetchall()
    return {name: select_progress(db, consumer) for name, consumer in rows}


def _name_task(db: Connection, run: int, ref: SampleRef) -> None:
    """Record the task of a sample that a consumer committed before the task's producer, which can make it again."""
    known = "EXISTS (SELECT 1 FROM tasks WHERE run = ? AND task_id = {})"
    db.execute(
        f"UPDATE samples SET task_id = ? WHERE run = ? AND sample_id = ? "
        f"AND {known.format('?')} AND NOT {known.format('samples.task_id')}",
        (ref.source_task_id, run, ref.sample_id, run, ref.source_task_id, run),
    )


def _is_committed(db: Connection, run: int, sample_id: str) -> bool:
    query = "SELECT 1 FROM samples WHERE run = ? AND sample_id = ? AND seq IS NOT NULL"
    return db.execute(query, (run, sample_id)).fetchone() is not None


def _find_or_insert_header(db: Connection, header: str) -> int:
    db.execute("INSERT OR IGNORE INTO ref_sets (header) VALUES (?)", (header,))
    return db.execute("SELECT ref_set FROM ref_sets WHERE header = ?", (header,)).fetchone()[0]
