"""Folder in which an engine passes hidden states to Draftworks: a safetensors file for each pass over a request.

    spool/{request id}.{start}.pending         a part that will come
    spool/{request id}.{start}.writing         a part that is being written
    spool/{request id}.{start}.safetensors     always complete, because it appears by a rename
    spool/{request id}.failed                  the reason why the engine could not write it, as text

The writer runs inside the engine, the reader in a Draftworks process on the same machine. Files here are temporary: the
reader removes the ones that it requested, checks them, and writes them to the feature store. A reader that gives up
removes the pending mark; a writer that finds no mark removes what it has written. Needs torch and safetensors only.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftworks.errors import PassingTroubleError, UnsoundEngineError
from draftworks.sglang.parts import AnsweredRequest, Part, PartSink, PartSource, make_late_error

SPOOL_SCHEMA = "draftworks.spool.2"
_FILE_OF_A_REQUEST = re.compile(r"draftworks-(logits-)?([0-9a-f]{16}-)?[0-9a-f]{32}\..+")
_FIRST_POLL_S, _LONGEST_POLL_S, _LOOK_S = 0.001, 0.05, 1.0
_LARGEST_RESERVE = 1 << 30
_RESERVE_SHARE = 0.05
ABANDONED_S = 6 * 3600.0
"""Age after which files that nobody has taken are removed where the disk has no room."""


class SpoolSink(PartSink):
    """Writes parts to a folder, and leaves a twentieth of its disk free, but at most 1 GiB."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def announce(self, request_id: str, start: int) -> None:
        (self._spool / f"{request_id}.{start}.pending").touch()

    def write(self, request_id: str, part: Part) -> None:
        self._require_room(part.nbytes)
        path = self._spool / f"{request_id}.{part.start}.safetensors"
        staging = path.with_suffix(".writing")
        metadata = {"schema": SPOOL_SCHEMA, "start": str(part.start)}
        try:
            save_file(part.list_tensors(), staging, metadata=metadata)
            os.replace(staging, path)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        try:
            path.with_suffix(".pending").unlink()
        except FileNotFoundError:  # the reader has given up
            path.unlink(missing_ok=True)

    def fail(self, request_id: str, reason: str) -> None:
        write_failure(self._spool, request_id, reason)

    def _require_room(self, nbytes: int) -> None:
        if nbytes > self._measure_room():
            sweep(self._spool, ABANDONED_S)
        room = self._measure_room()
        if nbytes > room:
            raise OSError(
                errno.ENOSPC,
                f"the disk of the spool {self._spool} has room for {max(0, room) >> 20} MiB beside what stays free, and "
                f"hidden states of {nbytes >> 20} MiB are to be written. Lower capture.in_flight_mb, or free or choose "
                "another disk: capture.server.spool of a server of yours, the run's folder for one of ours",
            )

    def _measure_room(self) -> int:
        disk = os.statvfs(self._spool)
        reserve = min(_LARGEST_RESERVE, int(_RESERVE_SHARE * disk.f_blocks * disk.f_frsize))
        return disk.f_bavail * disk.f_frsize - reserve


class SpoolSource(PartSource):
    """Reads parts from a folder. They are views of files that are removed and stay readable while they are used.

    Args:
        remote: whether the writer is on another host. A client of a network file system may list a folder as it was half a
            minute ago, unless it has changed the folder itself.
    """

    def __init__(self, spool: Path, remote: bool = False) -> None:
        self._spool = spool
        self._remote = remote

    def take(
        self, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> list[list[Part]]:
        ids = [request.request_id for request in requests]
        try:
            self._await(set(ids), timeout_s, look)
            found: dict[str, list[Path]] = {request_id: [] for request_id in ids}
            for path in self._list_files(found):
                found[path.name.partition(".")[0]].append(path)
            return [self._read(paths) for paths in found.values()]
        finally:
            self.discard(ids)

    def discard(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        for only_pending in (True, False):  # without its mark a part that is written later is removed by its writer
            for path in self._list_files(ids):
                if path.suffix == ".pending" or not only_pending:
                    path.unlink(missing_ok=True)

    def measure_room(self) -> int:
        """Return half of what is free on the disk."""
        return shutil.disk_usage(next(each for each in (self._spool, *self._spool.parents) if each.exists())).free // 2

    def _await(self, ids: set[str], timeout_s: float, look: Callable[[], None]) -> None:
        began = looked = time.monotonic()
        poll_s = _FIRST_POLL_S
        while pending := self._find_pending(ids):
            now = time.monotonic()
            if now - began > timeout_s:
                raise make_late_error(sorted(pending)[0], timeout_s)
            if now - looked > _LOOK_S:
                look()
                looked = now
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _find_pending(self, ids: set[str]) -> set[str]:
        files = [path.name for path in self._list_files(ids)]
        failed = {name.partition(".")[0] for name in files if name.endswith(".failed")}
        return {name.partition(".")[0] for name in files if name.endswith(".pending")} - failed

    def _list_files(self, ids: Iterable[str]) -> list[Path]:
        wanted = frozenset(ids)
        try:
            if self._remote:
                refreshing = self._spool / f".{uuid.uuid4().hex}.refresh"
                refreshing.touch()
                refreshing.unlink(missing_ok=True)
            names = os.listdir(self._spool)
        except FileNotFoundError:  # of a server that is being started again
            return []
        return [self._spool / name for name in names if name.partition(".")[0] in wanted]

    def _read(self, paths: Sequence[Path]) -> list[Part]:
        for path in paths:
            if path.suffix == ".failed":
                reason = path.read_text(encoding="utf-8")
                raise PassingTroubleError(f"the engine could not write hidden states: {reason}")
        parts = [_read_part(path) for path in paths if path.suffix == ".safetensors"]
        return sorted(parts, key=lambda part: part.start)


def write_part(spool: Path, request_id: str, part: Part) -> None:
    """Announce and write a part, in one call; tensors may be on any device."""
    sink = SpoolSink(spool)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in part.list_tensors().items()}
    sink.announce(request_id, part.start)
    sink.write(request_id, Part.from_tensors(part.start, on_cpu))


def write_failure(spool: Path, request_id: str, reason: str) -> None:
    """Write the reason why there is no part, for the reader."""
    staging = spool / f"{request_id}.failing"
    staging.write_text(reason, encoding="utf-8")
    os.replace(staging, spool / f"{request_id}.failed")


def take_parts(spool: Path, request_id: str, timeout_s: float = 60.0) -> list[Part]:
    """Return the parts of one finished request; see `PartSource.take`."""
    return SpoolSource(spool).take([AnsweredRequest(request_id)], timeout_s)[0]


def sweep(spool: Path, older_than_s: float) -> None:
    """Remove old files of requests whose reader was killed; files that do not belong to a request stay.

    Args:
        older_than_s: minimum age in seconds since the file was written; longer than any request waits for its answer.
    """
    oldest = time.time() - older_than_s
    for path in spool.glob("draftworks-*"):
        with suppress(OSError):  # removed meanwhile, or another user's file: harmless
            if _FILE_OF_A_REQUEST.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()


def _read_part(path: Path) -> Part:
    try:
        with safe_open(path, framework="pt") as stream:
            found = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise PassingTroubleError(f"{path} is not a readable safetensors file: {error}") from error
    if found.get("schema") != SPOOL_SCHEMA:
        raise UnsoundEngineError(
            f"{path} has schema {found.get('schema')!r}, expected {SPOOL_SCHEMA!r}: the engine loaded a hook of "
            "another version of Draftworks. Start it with the one that is installed here"
        )
    return Part.from_tensors(int(found["start"]), tensors)
