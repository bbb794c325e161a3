"""SQL of committed references, acknowledgements and consumers. Every function works inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.stream import sqlite_keys
from draftworks.stream.metadata_store import AckedStep, CommitResult, ConsumerProgress, RefPage
from draftworks.stream.ref_set import RefEncoder, decode_ref
from draftworks.stream.sqlite_tasks import DEAD, find_state, reopen


def insert_refs(db: Connection, run: int, refs: Sequence[SampleRef], frees: int | None = None) -> CommitResult:
    """Commit references of samples that have none, after all that are committed; refuse those of dead tasks.

    With `frees` their keys are counted, and a reference whose keys may be gone is stale.
    """
    encoder, ref_sets, nbytes = RefEncoder(), {}, 0
    found: dict[str, list[str]] = {name: [] for name in ("committed", "duplicates", "refused", "stale")}
    dead = {task_id for task_id in {ref.source_task_id for ref in refs} if find_state(db, run, task_id) == DEAD}
    first, freed = db.execute("SELECT next_seq, frees FROM runs WHERE run = ?", (run,)).fetchone()
    for ref in refs:
        slim = encoder.encode(ref)
        keys = () if frees is None else tuple(ref.feature_keys.values())
        if _is_committed(db, run, ref.sample_id):
            _name_task(db, run, ref)
            sqlite_keys.mark_unused(db, run, keys)
            found["duplicates"].append(ref.sample_id)
        elif ref.source_task_id in dead:
            sqlite_keys.mark_unused(db, run, keys)
            found["refused"].append(ref.sample_id)
        elif frees is not None and not sqlite_keys.take(db, run, keys, frees):
            found["stale"].append(ref.sample_id)
        else:
            if slim.header not in ref_sets:
                ref_sets[slim.header] = _find_or_insert_header(db, slim.header)
            seq = first + len(found["committed"])
            db.execute(
                "INSERT INTO samples (run, sample_id, seq, ref_set, line, task_id) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (run, sample_id) DO UPDATE SET seq = excluded.seq, ref_set = excluded.ref_set, "
                "line = excluded.line, task_id = excluded.task_id",
                (run, ref.sample_id, seq, ref_sets[slim.header], slim.line, ref.source_task_id),
            )
            found["committed"].append(ref.sample_id)
            nbytes += ref.estimated_bytes
    new = len(found["committed"])
    db.execute(
        "UPDATE runs SET next_seq = next_seq + ?, samples = samples + ?, bytes = bytes + ? WHERE run = ?",
        (new, new, nbytes, run),
    )
    return CommitResult(**{name: tuple(ids) for name, ids in found.items()}, frees=freed)


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
    db: Connection, run: int, consumer: int, sample_ids: Sequence[str], global_step: int, epoch: int, release: bool
) -> int:
    """Acknowledge samples; return how many are new.

    Raises:
        StoreError: a sample is unknown, or was acknowledged in this epoch at another step.
    """
    new, nbytes = 0, 0
    for place, sample_id in enumerate(sample_ids):
        row = db.execute(
            "SELECT samples.sample, seq, header, line, global_step FROM samples JOIN ref_sets USING (ref_set) "
            "LEFT JOIN acks ON acks.consumer = ? AND acks.sample = samples.sample AND acks.epoch = ? "
            "WHERE run = ? AND sample_id = ?",
            (consumer, epoch, run, sample_id),
        ).fetchone()
        if row is None or (row[1] is None and row[4] is None):
            raise StoreError(
                f"sample {sample_id} cannot be acknowledged at step {global_step}: no reference of it is committed"
            )
        sample, _, header, line, step = row
        if step is None:
            db.execute(
                "INSERT INTO acks (consumer, sample, epoch, global_step, place, released) VALUES (?, ?, ?, ?, ?, ?)",
                (consumer, sample, epoch, global_step, place, release),
            )
            ref = decode_ref(header, line)
            new, nbytes = new + 1, nbytes + ref.estimated_bytes
            if release:
                sqlite_keys.give_back(db, run, ref.feature_keys.values())
        elif step != global_step:
            raise StoreError(
                f"sample {sample_id} was acknowledged at step {step} of epoch {epoch}, and is again at step "
                f"{global_step}: it would count twice. After a restart, reconcile before training goes on"
            )
    _count_acked(db, consumer, new, nbytes)
    return new


def release_acked(db: Connection, run: int, consumer: int, global_step: int) -> None:
    """Give the keys of samples back that were acknowledged up to a step."""
    rows = db.execute(
        "SELECT header, line FROM acks JOIN samples USING (sample) JOIN ref_sets USING (ref_set) "
        "WHERE consumer = ? AND global_step <= ? AND released = 0",
        (consumer, global_step),
    ).fetchall()
    for header, line in rows:
        sqlite_keys.give_back(db, run, decode_ref(header, line).feature_keys.values())
    db.execute(
        "UPDATE acks SET released = 1 WHERE consumer = ? AND global_step <= ? AND released = 0", (consumer, global_step)
    )


def undo_acks(db: Connection, run: int, consumer: int, global_step: int) -> int:
    """Undo acknowledgements after a step; return how many. References whose keys were given back need them again."""
    rows = db.execute(
        "SELECT header, line, released FROM acks JOIN samples USING (sample) JOIN ref_sets USING (ref_set) "
        "WHERE consumer = ? AND global_step > ?",
        (consumer, global_step),
    ).fetchall()
    refs = [decode_ref(header, line) for header, line, _ in rows]
    for ref, (_, _, released) in zip(refs, rows, strict=True):
        if released:
            sqlite_keys.claim_again(db, run, ref.feature_keys.values())
    _count_acked(db, consumer, -len(refs), -sum(ref.estimated_bytes for ref in refs))
    db.execute("DELETE FROM acks WHERE consumer = ? AND global_step > ?", (consumer, global_step))
    return len(refs)


def select_order(db: Connection, consumer: int, after: int, limit: int) -> tuple[AckedStep, ...]:
    """Return acknowledged steps with their samples in order."""
    steps = db.execute(
        "SELECT DISTINCT global_step FROM acks WHERE consumer = ? AND global_step > ? ORDER BY global_step LIMIT ?",
        (consumer, after, limit),
    ).fetchall()
    samples = (
        "SELECT sample_id FROM acks JOIN samples USING (sample) WHERE consumer = ? AND global_step = ? ORDER BY place"
    )
    return tuple(AckedStep(step, tuple(each for (each,) in db.execute(samples, (consumer, step)))) for (step,) in steps)


def withdraw(db: Connection, run: int, sample_ids: Sequence[str]) -> tuple[str, ...]:
    """Withdraw references and reopen their tasks; return the samples whose task cannot make them again."""
    hopeless = []
    for sample_id in sample_ids:
        row = db.execute(
            "SELECT sample, task_id, header, line FROM samples JOIN ref_sets USING (ref_set) "
            "WHERE run = ? AND sample_id = ? AND seq IS NOT NULL",
            (run, sample_id),
        ).fetchone()
        if row is None:
            continue
        sample, task_id, header, line = row
        if not reopen(db, run, task_id):
            hopeless.append(sample_id)
            continue
        ref = decode_ref(header, line)
        sqlite_keys.give_back(db, run, ref.feature_keys.values())
        db.execute("UPDATE samples SET seq = NULL WHERE sample = ?", (sample,))
        change = (ref.estimated_bytes, run)
        db.execute("UPDATE runs SET samples = samples - 1, bytes = bytes - ? WHERE run = ?", change)
    return tuple(hopeless)


def find_consumer(db: Connection, run: int, name: str) -> int | None:
    """Return a consumer's number; None before its first call."""
    row = db.execute("SELECT consumer FROM consumers WHERE run = ? AND name = ?", (run, name)).fetchone()
    return None if row is None else row[0]


def add_consumer(db: Connection, run: int, name: str) -> int:
    """Return a consumer's number, made if new."""
    db.execute("INSERT OR IGNORE INTO consumers (run, name) VALUES (?, ?)", (run, name))
    return db.execute("SELECT consumer FROM consumers WHERE run = ? AND name = ?", (run, name)).fetchone()[0]


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


def _count_acked(db: Connection, consumer: int, samples: int, nbytes: int) -> None:
    change = (samples, nbytes, consumer)
    db.execute("UPDATE consumers SET samples = samples + ?, bytes = bytes + ? WHERE consumer = ?", change)


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
