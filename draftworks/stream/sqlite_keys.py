"""SQL of the keys that references need, see `MetadataStore`. Every function works inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sqlite3 import Connection


def take(db: Connection, run: int, keys: Sequence[str], frees: int) -> bool:
    """Count a reference that names keys; False, and nothing is changed, if one was freed after the first `frees`."""
    for key in keys:
        row = db.execute("SELECT freed FROM keys WHERE run = ? AND key = ?", (run, key)).fetchone()
        if row is not None and row[0] is not None and not 0 < row[0] <= frees:
            return False
    db.executemany(
        "INSERT INTO keys VALUES (?, ?, 1, NULL) ON CONFLICT (run, key) DO UPDATE SET uses = uses + 1, freed = NULL",
        ((run, key) for key in keys),
    )
    return True


def give_back(db: Connection, run: int, keys: Iterable[str]) -> None:
    """Uncount a reference; a key that no other one needs is to be freed, if it is counted at all."""
    db.executemany(
        "UPDATE keys SET uses = uses - 1, freed = CASE WHEN uses = 1 THEN coalesce(freed, 0) ELSE freed END "
        "WHERE run = ? AND key = ?",
        ((run, key) for key in keys),
    )


def claim_again(db: Connection, run: int, keys: Iterable[str]) -> None:
    """Count a reference again that was given back. Keys that are freed already stay so, until they are captured again."""
    db.executemany(
        "UPDATE keys SET uses = uses + 1, freed = nullif(max(freed, 0), 0) WHERE run = ? AND key = ?",
        ((run, key) for key in keys),
    )


def mark_unused(db: Connection, run: int, keys: Iterable[str]) -> None:
    """Have keys freed that a producer has put and no reference needs; -1: also if a removal that has begun is confirmed."""
    for key in keys:
        db.execute(
            "INSERT INTO keys VALUES (?, ?, 0, 0) ON CONFLICT (run, key) DO UPDATE "
            "SET freed = CASE WHEN freed IN (0, -1) THEN -1 ELSE 0 END WHERE uses = 0",
            (run, key),
        )


def confirm(db: Connection, run: int, freed: Sequence[str]) -> None:
    """Record that keys are removed from the store."""
    if not freed:
        return
    db.execute("UPDATE runs SET frees = frees + 1 WHERE run = ?", (run,))
    db.executemany(
        "UPDATE keys SET freed = CASE freed WHEN -1 THEN 0 ELSE (SELECT frees FROM runs WHERE run = keys.run) END "
        "WHERE run = ? AND key = ? AND uses = 0 AND freed IN (0, -1)",
        ((run, key) for key in freed),
    )


def drop_uses(db: Connection, run: int) -> None:
    """Have everything freed that is not."""
    db.execute("UPDATE keys SET uses = 0, freed = coalesce(freed, 0) WHERE run = ?", (run,))


def select_unused(db: Connection, run: int) -> tuple[str, ...]:
    """Return the keys to be freed. What was returned before has been removed by now, or its consumer has died."""
    db.execute("UPDATE keys SET freed = 0 WHERE run = ? AND freed = -1", (run,))
    rows = db.execute("SELECT key FROM keys WHERE run = ? AND freed <= 0 AND uses = 0", (run,))
    return tuple(key for (key,) in rows)
