"""The draft in service of one target and strategy, replaced by compare-and-swap; safe across processes and hosts.

    {var}/in_service/{target}/{strategy}/in_service.json        the record in service, replaced by one rename
    {var}/in_service/{target}/{strategy}/history/{number}.json  each record that was replaced, never changed
    {var}/in_service/{target}/{strategy}/.lock/                 the lease of whoever replaces it

A record is copied to the history before it is replaced. So at any moment the history and `in_service.json` together hold
every record that was ever in service and no other, wherever a process is killed. Readers need one read and no lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from draftworks.errors import StoreError
from draftworks.service.record import InService
from draftworks.storage.atomic import fsync, publish_json
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.names import require_name
from draftworks.storage.regular_files import read_json
from draftworks.storage.words import list_names

FOLDER = "in_service"
RECORD, HISTORY, LOCK = "in_service.json", "history", ".lock"
MAX_BYTES = 1 << 20
DIGITS = 8


class ConflictError(StoreError):
    """Another draft is in service than the one that was to be replaced. Nothing is changed."""


@dataclass(frozen=True)
class ServiceRegister:
    """The records of one target and strategy.

    Attributes:
        var: folder of all results.
    """

    var: Path
    target: str
    strategy: str

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.target) / require_name(self.strategy)

    def find(self) -> InService | None:
        """Return the record in service, by one read; None if no draft was ever promoted.

        Raises:
            StoreError: the file is damaged, or of another target.
        """
        return self._read(self.folder / RECORD)

    def require(self) -> InService:
        """Return the record in service. Raises StoreError if there is none."""
        found = self.find()
        if found is None:
            raise StoreError(
                f"target {self.target} has no {self.strategy} draft in service: run draftworks promote {self.target} "
                f"{self.strategy}"
            )
        return found

    def read_history(self) -> tuple[InService, ...]:
        """Return every record that was ever in service, oldest first, the present one last."""
        # The present one first: if it is replaced meanwhile, the history has it.
        current = self.find()
        if current is None:
            return ()
        found = {current.number: current}
        for path in self.folder.joinpath(HISTORY).glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) < current.number:
                record = self._read(path)
                if record is not None:
                    found[record.number] = record
        missing = set(range(1, current.number)) - found.keys()
        if missing:
            raise StoreError(
                f"{self.folder / HISTORY}: expected a record of each number up to {current.number}, found none of "
                f"{list_names(sorted(missing))}. Restore the folder from a backup"
            )
        return tuple(found[number] for number in sorted(found))

    def replace(self, expected: str | None, make: Callable[[InService | None], InService | None]) -> InService | None:
        """Replace the record if the draft in service is still the expected one; return the record that is then there.

        Args:
            expected: digest of the draft that is replaced; None if there is to be none.
            make: returns the new record from the present one, or None to leave it as it is. It is called under the
                lease, and an error of it leaves everything as it is.

        Raises:
            ConflictError: another draft is in service.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / LOCK
        busy = f"the draft in service of {self.target}, {self.strategy} is being replaced by another process: waiting"
        with hold_lock(lock, busy) as lease:
            current = self.find()
            if (found := None if current is None else current.draft.digest) != expected:
                raise ConflictError(
                    f"target {self.target}, {self.strategy}: expected {_name(expected)} in service, found {_name(found)}: "
                    "another process has replaced it, nothing is changed. Look at it (draftworks in-service "
                    f"{self.target} {self.strategy}) and ask again"
                )
            made = make(current)
            if made is None:
                return current
            if made.number != (1 if current is None else current.number + 1):
                raise StoreError(f"{self.folder}: a record of number {made.number} cannot follow")
            if current is not None:
                self._archive(current)
            _sweep(self.folder, f".{RECORD}.*.tmp")
            lease.confirm()
            publish_json(self.folder / RECORD, made.to_json())
            return made

    def _archive(self, record: InService) -> None:
        """Copy a record to the history, whole or not at all; one that is there already is left."""
        folder = self.folder / HISTORY
        folder.mkdir(exist_ok=True)
        _sweep(folder, "*.tmp")
        final = folder / f"{record.number:0{DIGITS}}.json"
        if final.exists():
            return
        staging = folder / f".{uuid4().hex}.tmp"
        publish_json(staging, record.to_json())
        try:
            os.link(staging, final)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            os.replace(staging, final)  # a file system without hard links; the lease keeps others out
        with suppress(FileNotFoundError):
            staging.unlink()
        fsync(folder)

    def _read(self, path: Path) -> InService | None:
        try:
            values = read_json(path, MAX_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read as the record of a draft in service: {error}") from None
        found = InService.from_json(values, str(path))
        if (found.target, found.strategy) != (self.target, self.strategy):
            raise StoreError(
                f"{path}: expected a record of {self.target}, {self.strategy}, found one of {found.target}, "
                f"{found.strategy}: was the file copied? Nothing is changed"
            )
        return found


def _sweep(folder: Path, pattern: str) -> None:
    """Remove staging files of processes that were killed: those that are only written under the lease, which the caller
    holds."""
    for leftover in folder.glob(pattern):
        leftover.unlink(missing_ok=True)


def _name(digest: str | None) -> str:
    return "no draft" if digest is None else f"draft {digest}"
