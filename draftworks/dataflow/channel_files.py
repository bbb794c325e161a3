"""Files of a reference channel: the locks of its two sides, their end markers, and what was consumed.

    channel.json            schema and form of the lines, written by the first writer
    refs.jsonl              the references, appended by the writer
    writer.lock/            lease of the writer's process; names it
    writer.end.json         the writer has ended or failed
    consumer.lock/, consumer.end.json
    consumed.json           samples and bytes that the consumer has consumed, for the writer's back-pressure

Nothing is memory-mapped or watched, so the folder may be on a network file system.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from draftworks.dataflow.watermark import InFlight
from draftworks.errors import StoreError
from draftworks.storage.files import explain_full_disk, publish_json, read_json
from draftworks.storage.lease import DEFAULT_TIMES, Lease, LeasePath, LeaseState, LeaseTimes

Side = Literal["writer", "consumer"]

SCHEMA = "draftworks.ref_channel.1"
HEADER, REFS, CONSUMED = "channel.json", "refs.jsonl", "consumed.json"
_POLL_S = 0.02
LOCK_PATIENCE_S = 1.0
"""A lock that is only probed, or whose owner is just ending, becomes free within this time."""
_MAX_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndMarker:
    """How a side ended.

    Attributes:
        failed: whether it failed, for `reason`; otherwise it came to its end.
        samples: references of the whole stream, as the writer counts them.
        session: the start of the run to which it belongs; see `StreamingRefChannel`.
    """

    failed: bool
    reason: str = ""
    samples: int = 0
    session: str = ""


class SideLock:
    """Exclusive ownership of one side of a channel; it ends with its process, in whatever way that ends.

    Where the owner was on another machine and is not heard of, its lease is waited for, up to a minute or so.

    Raises:
        StoreError: another process has this side, or the folder cannot be written.
    """

    def __init__(self, folder: Path, side: Side, times: LeaseTimes = DEFAULT_TIMES) -> None:
        path = LeasePath(_lock_path(folder, side), times)
        started = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while (lease := path.try_acquire()) is None:
                elsewhere = path.look() is LeaseState.WATCHED
                if time.monotonic() - started > (2 * times.lease_s if elsewhere else LOCK_PATIENCE_S):
                    raise StoreError(
                        f"reference channel {folder} has a {side} already: {path.describe_holder()}. "
                        f"A channel has one {side}: stop that process, or give each its own channel"
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._lease: Lease | None = lease

    @property
    def is_held(self) -> bool:
        return self._lease is not None

    def confirm(self) -> None:
        """Raise LeaseLostError if another process was given the side meanwhile."""
        if self._lease is not None:
            self._lease.confirm()

    def release(self) -> None:
        """Give the side up; without effect the second time."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def describe_side(folder: Path, side: Side) -> str:
    """Return who has, or last had, a side, and whether that process still holds it; for error messages."""
    path = LeasePath(_lock_path(folder, side))
    try:
        owner, state = path.find_holder(), path.look()
    except OSError:
        return f"{side}: an unknown process"
    if owner is None:
        return f"no {side} has come"
    return f"{side}: {owner}, {'which is gone' if state.is_free else 'still there'}"


def describe_sides(folder: Path) -> str:
    return f"{describe_side(folder, 'writer')}; {describe_side(folder, 'consumer')}"


def read_end(folder: Path, side: Side) -> EndMarker | None:
    """Return how a side ended; None while it has not."""
    path = _end_path(folder, side)
    fields = _read_file(path)
    if fields is None:
        return None
    try:
        return EndMarker(**fields)
    except TypeError as error:
        raise StoreError(f"{path} is no end marker of this version ({error}). Use a new channel") from error


def write_end(folder: Path, side: Side, marker: EndMarker) -> None:
    try:
        publish_json(_end_path(folder, side), asdict(marker))
    except OSError as error:
        raise cannot_write(folder, error) from error


def remove_end(folder: Path, side: Side) -> None:
    _end_path(folder, side).unlink(missing_ok=True)


def read_consumed(folder: Path) -> InFlight:
    """Return what the consumer has consumed since it opened the channel."""
    fields = _read_file(folder / CONSUMED) or {}
    return InFlight(int(fields.get("samples", 0)), int(fields.get("bytes", 0)))


def write_consumed(folder: Path, consumed: InFlight) -> None:
    """Replace the count atomically, without fsync: after a power cut the consumer counts anew anyway."""
    staging = folder / f".{CONSUMED}.tmp"
    try:
        staging.write_text(json.dumps({"samples": consumed.samples, "bytes": consumed.bytes}))
        os.replace(staging, folder / CONSUMED)
    except OSError as error:
        raise cannot_write(folder, error) from error


def write_header(folder: Path, form: str) -> None:
    """Write the header of a new channel, or check the one there is, as `has_header`."""
    if not has_header(folder, form):
        try:
            publish_json(folder / HEADER, {"schema": SCHEMA, "form": form})
        except OSError as error:
            raise cannot_write(folder, error) from error


def has_header(folder: Path, form: str) -> bool:
    """Whether a writer has begun the channel.

    Raises:
        StoreError: the channel is of another schema, or its lines have another form.
    """
    path = folder / HEADER
    fields = _read_file(path)
    if fields is None:
        return False
    found = (fields.get("schema"), fields.get("form"))
    if found != (SCHEMA, form):
        raise StoreError(
            f"{path}: expected schema {SCHEMA!r} with lines of form {form!r}, found {found[0]!r} and {found[1]!r}. "
            "Another version wrote this channel: use a new one"
        )
    return True


class EndableSide(Protocol):
    """A side that ends by its end or by a failure."""

    def close(self) -> None: ...

    def fail(self, reason: str) -> None: ...


def end_side(side: EndableSide, error: BaseException | None) -> None:
    """End a side at the end of its `with` block. Where the failure cannot be written, it stays the one that is raised."""
    if error is None:
        side.close()
        return
    try:
        side.fail(f"{type(error).__name__}: {error}")
    except StoreError as unwritten:
        log.warning("the other side of a reference channel cannot be told of the failure: %s", unwritten)


def cannot_write(folder: Path, error: OSError) -> StoreError:
    return explain_full_disk(error, folder) or StoreError(
        f"reference channel {folder}: expected a folder that this user may write to, found: {error}. Correct its "
        "permissions, or name another folder"
    )


def _read_file(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    A network file system may report a file that was just replaced as stale, so other errors count at the third try only.
    """
    for last in (False, False, True):
        try:
            fields = read_json(path, _MAX_BYTES)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            return fields
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if last:
                raise StoreError(f"{path} cannot be read ({error}). If it is damaged, use a new channel") from error
            time.sleep(0.01)
    return None


def _lock_path(folder: Path, side: Side) -> Path:
    return folder / f"{side}.lock"


def _end_path(folder: Path, side: Side) -> Path:
    return folder / f"{side}.end.json"
