"""A rank's sign of life: a small file beside its error file, by which a launcher sees a rank that stands still.

What counts as progress is broad, because a healthy run may be slow: a word of the program (a step, a log line), and any
use of a processor, such as a long compilation or the loading of weights. A process that waits for a rank that will
never come has neither. A stopped process does not even write the file. Torch-free.
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
from draftworks.storage.regular_files import read_json

FILE = "heartbeat.json"
INTERVAL_S = 1.0
_BUSY_SHARE = 0.01
"""Of a processor, over an interval: more is work. A loop that looks ten times a second whether something has come uses less."""
_FRAMES = 4
_MOST_BYTES = 1 << 20
_OURS = Path(__file__).parents[1]
_LONGEST_WORD = 200


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a rank last wrote.

    Attributes:
        beats: rises with progress; `written` rises as long as the process runs at all.
        said: the program's last line.
        where: of the main thread the last frames in our own code, then the innermost.
        ended: the program came to its end.
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
        """None if there is none, or its writer was cut off."""
        try:
            values = read_json(path, _MOST_BYTES)
            return cls(**{**values, "where": tuple(values["where"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Heartbeat:
    """Writes a rank's `Pulse` once a second from a thread of its own; SIGUSR1 prints the stacks of all threads.

    Made in the main thread.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._said = "nothing yet"
        self._beats = self._written = 0
        self._over = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._write(ended=False)
        self._thread.start()

    @classmethod
    def beside_error_file(cls) -> Heartbeat | None:
        """Of a rank that torchrun started; None for a program that a person started alone, whom they watch."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        return cls(Path(path).with_name(FILE), int(os.environ["RANK"])) if path and "RANK" in os.environ else None

    def beat(self, said: str | None = None) -> None:
        """Progress has been made."""
        self._beats += 1
        self._said = self._said if said is None else said[:_LONGEST_WORD]

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
        """A full disk or a lost mount is not this thread's to report; the launcher sees a file that stands still."""
        self._written += 1
        where = tuple(_places(sys._current_frames().get(self._main)))
        pulse = HeartbeatRecord(self._rank, os.getpid(), self._beats, self._written, self._said, where, ended)
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(pulse)))
            partial.replace(self._path)


def _places(frame: FrameType | None) -> list[str]:
    """The innermost frame and the last ones in our own code, outermost first."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        if not found or Path(code.co_filename).is_relative_to(_OURS):
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return found[::-1]
