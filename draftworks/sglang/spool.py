"""Folder in which an engine passes hidden states to Draftworks: a safetensors file for each pass over a request.

    spool/{request id}.{start}.safetensors     always complete, because it appears by a rename
    spool/{request id}.failed                  the reason why the engine could not write it, as text

The writer runs inside the engine, the reader in a Draftworks process on the same machine. Files here are temporary: the
reader removes the ones that it requested, checks them, and writes them to the feature store. Needs torch and
safetensors only.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftworks.errors import PassingTroubleError, UnsoundEngineError

SPOOL_SCHEMA = "draftworks.spool.1"
_PREFIX = "draftworks-"
_WITH_LOGITS = f"{_PREFIX}logits-"
_FILE_OF_A_REQUEST = re.compile(rf"{_PREFIX}(logits-)?[0-9a-f]{{32}}\..+")


def make_request_id(with_logits: bool = False) -> str:
    """Return an id that makes the engine write this request's states, and its next-token logits if `with_logits`."""
    return f"{_WITH_LOGITS if with_logits else _PREFIX}{uuid.uuid4().hex}"


def is_captured(request_id: str) -> bool:
    """Return whether a request's states are to be written; those of health checks and other clients are not."""
    return request_id.startswith(_PREFIX)


def wants_logits(request_id: str) -> bool:
    return request_id.startswith(_WITH_LOGITS)


@dataclass(frozen=True)
class Part:
    """One forward pass over `T` consecutive tokens of a request. A sound capture is one part that begins at 0.

    Attributes:
        start: number of tokens before these, which came from a cache or from an earlier pass.
        input_ids: (T,), int64.
        taps: (T, k * H), the tapped streams side by side in ascending order.
        last: (T, H), after the final norm.
        logits: (V,), for the token after the last one, as the engine samples from them; None if not requested.
    """

    start: int
    input_ids: Tensor
    taps: Tensor
    last: Tensor
    logits: Tensor | None = None


def write_part(spool: Path, request_id: str, part: Part) -> None:
    """Write a part to the spool; its file appears complete, by a rename. Tensors may be on any device."""
    tensors = {"input_ids": part.input_ids, "taps": part.taps, "last": part.last}
    if part.logits is not None:
        tensors["logits"] = part.logits
    on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    path = spool / f"{request_id}.{part.start}.safetensors"
    staging = path.with_suffix(".tmp")
    save_file(on_cpu, staging, metadata={"schema": SPOOL_SCHEMA, "start": str(part.start)})
    os.replace(staging, path)


def write_failure(spool: Path, request_id: str, reason: str) -> None:
    """Write the reason why there is no part, for the reader."""
    (spool / f"{request_id}.failed").write_text(reason, encoding="utf-8")


def take_parts(spool: Path, request_id: str) -> list[Part]:
    """Return all parts of a finished request, if any, in the order of their tokens; remove them from the spool.

    Raises:
        PassingTroubleError: the engine failed to write one, as on a full disk, or a file is damaged.
        UnsoundEngineError: a file is of another schema.
    """
    failed = spool / f"{request_id}.failed"
    try:
        if failed.exists():
            raise PassingTroubleError(f"the engine could not write hidden states: {failed.read_text(encoding='utf-8')}")
        return sorted(map(_read, spool.glob(f"{request_id}.*.safetensors")), key=lambda part: part.start)
    finally:
        discard_parts(spool, [request_id])


def discard_parts(spool: Path, request_ids: Iterable[str]) -> None:
    """Remove all files of these requests from the spool."""
    for request_id in request_ids:
        for path in spool.glob(f"{request_id}.*"):
            path.unlink(missing_ok=True)


def sweep(spool: Path, older_than_s: float) -> None:
    """Remove old files of requests whose reader was killed; files that do not belong to a request stay.

    Args:
        older_than_s: minimum age in seconds since the file was written; longer than any request waits for its answer.
    """
    oldest = time.time() - older_than_s
    for path in spool.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or another user's file: harmless
            if _FILE_OF_A_REQUEST.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()


def _read(path: Path) -> Part:
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
    return Part(int(found["start"]), tensors["input_ids"], tensors["taps"], tensors["last"], tensors.get("logits"))
