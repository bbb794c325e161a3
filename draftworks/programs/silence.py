"""Lines about what a program is doing, printed where it has nothing else to say for a while. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftworks.distributed.stop_signals import block_stop_signals

SILENCE_S = 15.0
"""Seconds without a line after which one is printed."""
_LOOK_S = 1.0
_BUSY_SHARE = 0.01
"""Processor time over a silence below which a program waits, as by its heartbeat."""


class Silence:
    """Knows when a program last said something, and says after `SILENCE_S` what it is doing and for how long.

    Args:
        say: prints a line; called from a thread of its own.
        clock, cpu: seconds of wall and of processor time.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._say = say
        self._clock = clock
        self._cpu = cpu
        self._doing: tuple[str, float] | None = None
        self._over = threading.Event()
        self.heard()

    def heard(self) -> None:
        """Note that a line was printed."""
        self._last, self._last_cpu = self._clock(), self._cpu()
        self._spoke = self._last

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name what is done meanwhile, such as "loading the target"."""
        before, self._doing = self._doing, (what, self._clock())
        try:
            yield
        finally:
            self._doing = before

    def break_it(self) -> None:
        """Say what is being done, if nothing was said for `SILENCE_S`."""
        now, cpu = self._clock(), self._cpu()
        quiet = now - self._last
        if quiet < SILENCE_S:
            return
        idle = cpu - self._last_cpu < _BUSY_SHARE * quiet
        what, since = self._doing or ("nothing to report", self._spoke)
        self._say(f"{what}: {now - since:.0f} s so far, {'waiting' if idle else 'at work'}")
        self._last, self._last_cpu = now, cpu

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look once a second, from a thread."""
        thread = threading.Thread(target=self._watch, name="silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        block_stop_signals()
        while not self._over.wait(_LOOK_S):
            self.break_it()
