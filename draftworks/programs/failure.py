"""Error file of a failed rank: torchelastic's format, with fields by which a launcher finds the cause. Torch-free.

torchrun reads the file too. The added fields are the time in nanoseconds (torchelastic's whole seconds do not separate
the rank that failed first from those that failed because of it), the rank, and whether the user has to fix the error.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError
from draftworks.storage.files import read_json

LESS_MEMORY = "If memory ran out, docs/real-model.md says which keys need less of it"
_NS = 1_000_000_000
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class RankFailure:
    """One rank's error.

    Attributes:
        user_error: whether it is a `DraftworksError`: its message is enough, and no retry helps.
        interrupted: whether the rank stopped in order after a signal: a retry continues where it stopped.
    """

    message: str
    traceback: str
    time_ns: int
    rank: int | None = None
    user_error: bool = False
    interrupted: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankFailure:
        user_error, interrupted = isinstance(error, DraftworksError), isinstance(error, KeyboardInterrupt)
        message = str(error) if user_error or interrupted else f"{type(error).__name__}: {error}"
        if _is_of_memory(error):
            message = f"{message.rstrip('. ')}. {LESS_MEMORY}"
        return cls(
            message=message,
            traceback="".join(traceback.format_exception(error)),
            time_ns=time.time_ns(),
            rank=rank,
            user_error=user_error,
            interrupted=interrupted,
        )

    def to_json(self) -> dict[str, Any]:
        extra = {
            "py_callstack": self.traceback,
            "timestamp": str(self.time_ns // _NS),
            "time_ns": self.time_ns,
            "rank": self.rank,
            "user_error": self.user_error,
            "interrupted": self.interrupted,
        }
        return {"message": {"message": self.message, "extraInfo": extra}}

    @classmethod
    def read(cls, path: Path) -> RankFailure | None:
        """Read an error file; None if it does not exist, or its writer died before it was complete."""
        try:
            message = read_json(path, _MOST_BYTES)["message"]
            if isinstance(message, str):
                return cls(message=message, traceback="", time_ns=path.stat().st_mtime_ns)
            extra = message["extraInfo"]
            return cls(
                message=message["message"],
                traceback=extra["py_callstack"],
                time_ns=int(extra.get("time_ns", int(extra["timestamp"]) * _NS)),
                rank=extra.get("rank"),
                user_error=extra.get("user_error", False),
                interrupted=extra.get("interrupted", False),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def leave_error_file(error: BaseException) -> None:
    """Write an error to the file where a launcher looks for it; nothing happens in a process that has no launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps(RankFailure.of(error, int(os.environ.get("RANK", "0"))).to_json()))


def _is_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a GPU ran out; torch's allocator of the host has no class for it."""
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in str(error)
