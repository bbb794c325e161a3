"""Heartbeat of a rank: a small file beside its error file, by which a launcher finds a rank that hangs. Torch-free.

A healthy run may be slow, so many things count as progress: a step or a log line of the program, and any CPU use, such
as a long compilation or the loading of weights. A process that waits for another rank forever has neither. A stopped
process does not even write the file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.storage.files import read_json

FILE = "heartbeat.json"
INTERVAL_S = 1.0
_BUSY_SHARE = 0.01
"""CPU use over an interval above which the process is at work. A loop that polls ten times a second uses less."""
_FRAMES = 4
_MOST_BYTES = 1 << 20
_OURS = Path(__file__).parents[1]
_MAX_MESSAGE = 200


@dataclass(frozen=True)
class HeartbeatRecord:
    """The latest heartbeat of a rank.

    Attributes:
        beats: increases with progress.
        written: increases as long as the process runs.
        said: the last line that the program printed.
        where: the main thread's last frames in our own code, then its innermost frame.
        ended: whether the program has ended.
    """

    rank: int
    pid: int
    beats: int = 0
    written: int = 0
    said: str = "nothing yet"
    where: tuple[str, ...] = ()
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> HeartbeatRecord | None:
        """Read a heartbeat file; None if it does not exist or is incomplete."""
        try:
            values = read_json(path, _MOST_BYTES)
            return cls(**{**values, "where": tuple(values["where"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Heartbeat:
    """Writes a rank's `HeartbeatRecord` once a second from its own thread.

    From then on SIGUSR1 prints the stacks of all threads, and so does a fault in native code, which ends the process.

    Must be made in the main thread.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._said = "nothing yet"
        self._beats = self._written = 0
        self._over = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        faulthandler.enable()
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._write(ended=False)
        self._thread.start()

    @classmethod
    def beside_error_file(cls) -> Heartbeat | None:
        """Start the heartbeat of a rank that torchrun started; None for a program that a person started by hand."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        return cls(Path(path).with_name(FILE), int(os.environ["RANK"])) if path and "RANK" in os.environ else None

    def beat(self, message: str | None = None) -> None:
        """Record progress."""
        self._beats += 1
        self._said = self._said if message is None else message[:_MAX_MESSAGE]

    def close(self) -> None:
        self._over.set()
        self._thread.join(INTERVAL_S)
        self._write(ended=True)

    def _write_on(self) -> None:
        block_stop_signals()
        since, used = time.monotonic(), time.process_time()
        while not self._over.wait(INTERVAL_S):
            now, used_now = time.monotonic(), time.process_time()
            self._beats += used_now - used > _BUSY_SHARE * (now - since)
            since, used = now, used_now
            self._write(ended=False)

    def _write(self, *, ended: bool) -> None:
        """Write the file. Errors are ignored: the launcher notices a file that does not change."""
        self._written += 1
        where = tuple(_format_frames(sys._current_frames().get(self._main)))
        pulse = HeartbeatRecord(self._rank, os.getpid(), self._beats, self._written, self._said, where, ended)
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(pulse)))
            partial.replace(self._path)


def _format_frames(frame: FrameType | None) -> list[str]:
    """Return the innermost frame and the last frames in our own code, outermost first."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        if not found or Path(code.co_filename).is_relative_to(_OURS):
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return found[::-1]


LABEL = "label"
"""Key of the name in the extras of Dagster Pipes."""
