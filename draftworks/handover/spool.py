"""Folder in which an engine passes hidden states to Draftworks: a safetensors file for each pass over a request.

    spool/{request id}.{start}.pending         a part that will come
    spool/{request id}.{start}.writing         a part that is being written
    spool/{request id}.{start}.safetensors     always complete, because it appears by a rename
    spool/{request id}.failed                  the reason why the engine could not write it, as text

The writer runs inside the engine, the reader in a Draftworks process on the same machine. Files here are temporary: the
reader removes the ones that it requested, checks them, and writes them to the feature store. A reader that gives up
removes the pending mark; a writer that finds no mark removes what it has written. Needs torch and safetensors only.

What is passed, and the two ends of a way to do so, are `Part`, `PartSink` and `PartSource`: hidden states of a request as an
engine hands them over, through this folder or through Mooncake.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftworks.errors import PassingTroubleError, UnsoundEngineError

_PREFIX = "draftworks-"
_WITH_LOGITS = f"{_PREFIX}logits-"
_MADE = re.compile(rf"{_PREFIX}(?:logits-)?([0-9a-f]{{16}})-")
_WHOLE = re.compile(rf"{_PREFIX}(?:logits-)?[0-9a-f]{{16}}-[0-9a-f]{{32}}")


def make_request_id(with_logits: bool = False) -> str:
    """Return an id that makes the engine write this request's states, and its next-token logits if `with_logits`.

    It has the time, so that whoever finds parts of it knows how old they are.
    """
    return f"{_WITH_LOGITS if with_logits else _PREFIX}{time.time_ns():016x}-{uuid.uuid4().hex}"


def read_request_time(request_id: str) -> float | None:
    """Return when `make_request_id` made an id, or what begins with it, in seconds since the epoch; None for others."""
    match = _MADE.match(request_id)
    return int(match[1], 16) / 1e9 if match else None


def is_captured(request_id: str) -> bool:
    """Return whether a request's states are to be written; those of health checks and other clients are not."""
    return request_id.startswith(_PREFIX)


def find_request_id(engine_id: str) -> str | None:
    """Return the id of `make_request_id` in what an engine made of it, such as `cmpl-{id}-0-5f2c81aa`; None if none is."""
    match = _WHOLE.search(engine_id)
    return match[0] if match else None


def wants_logits(request_id: str) -> bool:
    return request_id.startswith(_WITH_LOGITS)


@dataclass(frozen=True)
class Part:
    """One forward pass over `T` consecutive tokens of a request. A sound capture is one part that begins at 0.

    Attributes:
        start: number of tokens before these, which came from a cache or from an earlier pass.
        input_ids: (T,), int64.
        taps: (k, T, H), the tapped streams in ascending order.
        last: (T, H), after the final norm.
        logits: (V,), for the token after the last one, as the engine samples from them; None if not requested.
    """

    start: int
    input_ids: Tensor
    taps: Tensor
    last: Tensor
    logits: Tensor | None = None

    @classmethod
    def from_tensors(cls, start: int, tensors: dict[str, Tensor]) -> Part:
        return cls(start, tensors["input_ids"], tensors["taps"], tensors["last"], tensors.get("logits"))

    def list_tensors(self) -> dict[str, Tensor]:
        tensors = {"input_ids": self.input_ids, "taps": self.taps, "last": self.last}
        return tensors if self.logits is None else {**tensors, "logits": self.logits}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.list_tensors().values())


@dataclass(frozen=True)
class AnsweredRequest:
    """A request that the server has answered. Its part may still be on its way.

    Attributes:
        cached_tokens: as the server reported: where the first part begins.
    """

    request_id: str
    cached_tokens: int = 0


class PartSink(ABC):
    """The engine's end. A part is announced before the server answers, and may be written after that."""

    @abstractmethod
    def announce(self, request_id: str, start: int) -> None:
        """Let the reader know that a part will follow, or a failure."""

    @abstractmethod
    def write(self, request_id: str, part: Part) -> None:
        """Publish an announced part, of contiguous tensors in main memory, complete or not at all."""

    @abstractmethod
    def fail(self, request_id: str, reason: str) -> None:
        """Publish the reason why a part does not come."""


class PartSource(ABC):
    """The reader's end."""

    @abstractmethod
    def take(
        self, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> list[list[Part]]:
        """Wait for the parts of answered requests, return them in the order of their tokens, and remove them.

        A request of which no part was announced has none.

        Args:
            timeout_s: seconds to wait for what was announced.
            look: called about once a second meanwhile; raises if the engine is gone.

        Raises:
            PassingTroubleError: the engine failed to write a part, as on a full disk; it did not come in time, or is
                damaged.
            UnsoundEngineError: a part is of another schema.
        """

    @abstractmethod
    def measure_room(self) -> int:
        """Return the bytes of parts that one reader may have on their way."""

    @abstractmethod
    def discard(self, request_ids: Iterable[str]) -> None:
        """Remove everything of these requests, also what is still being written."""


def make_late_error(request_id: str, timeout_s: float) -> PassingTroubleError:
    return PassingTroubleError(
        f"the engine answered request {request_id}, and its hidden states have not come for {timeout_s:g} s. Look at its "
        "log, and at the disk or store that they go through"
    )


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
