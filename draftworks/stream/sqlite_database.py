"""The SQLite file of the control plane: schema, checks at opening, transactions that are durable when they return."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.shared_folder import find_mount

APPLICATION_ID = 0x44574350
"""SQLite's mark of the program that a file belongs to: "DWCP"."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 60.0
_RETRY_S = 0.01
WAL_PAGES = 8192
"""Pages of 4 KiB that gather in the log before they are copied into the file, each page once."""
_TABLES = """
CREATE TABLE runs (run INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE, next_seq INTEGER NOT NULL DEFAULT 1);
CREATE TABLE tasks (
    task INTEGER PRIMARY KEY, run INTEGER NOT NULL, task_id TEXT NOT NULL, step INTEGER NOT NULL,
    state INTEGER NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL,
    worker TEXT NOT NULL DEFAULT '', request TEXT NOT NULL DEFAULT '', expires_at REAL NOT NULL DEFAULT 0,
    body TEXT NOT NULL, reasons TEXT NOT NULL DEFAULT '[]', UNIQUE (run, task_id));
CREATE INDEX tasks_by_state ON tasks (run, state, step, task);
CREATE TABLE ref_sets (ref_set INTEGER PRIMARY KEY, header TEXT NOT NULL UNIQUE);
CREATE TABLE samples (
    sample INTEGER PRIMARY KEY, run INTEGER NOT NULL, sample_id TEXT NOT NULL, seq INTEGER, ref_set INTEGER NOT NULL,
    line TEXT NOT NULL, task_id TEXT NOT NULL, UNIQUE (run, sample_id));
CREATE UNIQUE INDEX samples_in_order ON samples (run, seq);
CREATE TABLE consumers (
    consumer INTEGER PRIMARY KEY, run INTEGER NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '',
    expires_at REAL NOT NULL DEFAULT 0, UNIQUE (run, name));
CREATE TABLE acks (
    consumer INTEGER NOT NULL, sample INTEGER NOT NULL, epoch INTEGER NOT NULL, global_step INTEGER NOT NULL,
    PRIMARY KEY (consumer, sample, epoch)) WITHOUT ROWID;
CREATE TABLE checkpoints (
    consumer INTEGER NOT NULL, global_step INTEGER NOT NULL, PRIMARY KEY (consumer, global_step)) WITHOUT ROWID;
"""
_LATER_TABLES = (
    "CREATE TABLE IF NOT EXISTS departures (consumer INTEGER PRIMARY KEY, reason TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS acks_by_step ON acks (consumer, global_step)",
    "CREATE TABLE IF NOT EXISTS facts (run INTEGER, name TEXT, text TEXT NOT NULL, PRIMARY KEY (run, name)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS keys (run INTEGER, key TEXT, uses INTEGER NOT NULL, freed INTEGER, "
    "PRIMARY KEY (run, key)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS keys_to_free ON keys (run) WHERE freed <= 0",
)
_LATER_COLUMNS = {
    "runs": (
        "samples INTEGER NOT NULL DEFAULT 0",
        "bytes INTEGER NOT NULL DEFAULT 0",
        "frees INTEGER NOT NULL DEFAULT 0",
    ),
    "consumers": ("samples INTEGER NOT NULL DEFAULT 0", "bytes INTEGER NOT NULL DEFAULT 0"),
    "acks": ("place INTEGER NOT NULL DEFAULT 0", "released INTEGER NOT NULL DEFAULT 0"),
}
"""Added, with the tables above, to a database of this schema that was made before them."""
# samples.seq is the place in commit order; null for a reference that was withdrawn. Acknowledgements of such a sample
# stay, so its row does. runs.samples and runs.bytes are what is committed, those of consumers what they acknowledged.
# keys.freed is null for a key in the store, 0 for one to be removed, -1 for one that was put once more meanwhile, and
# else the number of its removal; keys.uses counts the references that need it.


class SqliteDatabase:
    """One connection of this process, used by its threads in turn; a forked child opens its own.

    Args:
        path: the file, created with its folder if absent; None keeps the database in the memory of this process.
        busy_timeout_s: how long a transaction waits for those of other processes.

    Raises:
        StoreError: the path is on a network file system, cannot be written, or is not a database of this schema.
    """

    def __init__(self, path: Path | None, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._inherited: list[sqlite3.Connection] = []
        if path is not None:
            _require_local(path)
        self._connection: sqlite3.Connection | None = self._open()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose changes are on the disk when the block ends, and undone if it raises.

        Raises:
            StoreError: the database is busy, damaged, or the disk refuses.
        """
        with self._lock:
            connection = self._own_connection()
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._describe(error) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one state of the database. Raises StoreError as `transaction`."""
        with self._lock:
            connection = self._own_connection()
            try:
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise self._describe(error) from error

    def close(self) -> None:
        """Close this process's connection; a second call does nothing."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _own_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"{self._name}: the control-plane database is closed")
        if self._pid != os.getpid():
            if self.path is None:
                raise StoreError(
                    "a control plane in memory belongs to the process that made it; this one was forked off"
                )
            # SQLite forbids using, and closing, a connection in a forked child.
            self._inherited.append(self._connection)
            self._connection, self._pid = self._open(), os.getpid()
        return self._connection

    @property
    def _name(self) -> str:
        return str(self.path or "memory")

    def _open(self) -> sqlite3.Connection:
        place = ":memory:" if self.path is None else str(self.path)
        connection = None
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                place, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            self._prepare(connection)
            return connection
        except (OSError, sqlite3.Error) as error:
            if connection is not None:
                connection.close()
            raise self._describe(error) from error
        except StoreError:
            if connection is not None:
                connection.close()
            raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check the file before anything is changed in it; then WAL, and the tables of a new one."""
        connection.execute("BEGIN")  # one view of the file: another process may be making its tables
        self._require_own(connection)
        connection.execute("COMMIT")
        self._choose_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute("BEGIN IMMEDIATE")
        if not self._require_own(connection):
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in _LATER_TABLES:
            connection.execute(statement)
        for table, columns in _LATER_COLUMNS.items():
            known = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
            for column in columns:
                if column.partition(" ")[0] not in known:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        connection.execute("COMMIT")

    def _choose_wal(self, connection: sqlite3.Connection) -> None:
        """Set the journal of the file. SQLite does not wait for another process that does so at the same moment."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _require_own(self, connection: sqlite3.Connection) -> bool:
        """Return False for an empty file. Raises StoreError for the database of another program or schema."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables and not application and not version:
            return False
        if application != APPLICATION_ID:
            raise StoreError(
                f"{self._name}: expected a control-plane database of Draftworks, found another program's. "
                "Name another file as metadata_db_path"
            )
        if version != SCHEMA_VERSION:
            age = "an older" if version < SCHEMA_VERSION else "a newer"
            raise StoreError(
                f"{self._name}: expected control-plane schema {SCHEMA_VERSION}, found {version}, of {age} version of "
                "Draftworks. Use that version, or name another file as metadata_db_path: the run then begins anew"
            )
        return True

    def _describe(self, error: Exception) -> StoreError:
        text = str(error)
        if isinstance(error, sqlite3.DatabaseError) and "not a database" in text:
            return StoreError(
                f"{self._name}: expected a control-plane database, found a file that is not SQLite's. "
                "Name another file as metadata_db_path"
            )
        if "locked" in text or "busy" in text:
            return StoreError(
                f"{self._name}: another process has held the control-plane database for more than "
                f"{self._busy_timeout_s:.0f} s ({text}). Look for one that is stopped or stuck"
            )
        if isinstance(error, OSError) or "unable to open" in text or "readonly" in text:
            return StoreError(
                f"{self._name}: expected a folder that this user may write to, found: {text}. "
                "Correct its permissions, or name another file as metadata_db_path"
            )
        return StoreError(f"{self._name}: the control-plane database failed: {text}")


def _require_local(path: Path) -> None:
    mount = find_mount(path)
    if mount is not None and mount.is_shared:
        raise StoreError(
            f"{path} is on a network file system ({mount.kind}, mounted on {mount.point}): expected a disk of this host, "
            "because SQLite's locks do not hold between hosts. Name a local file as metadata_db_path; processes of "
            "other hosts reach it over the control server"
        )
