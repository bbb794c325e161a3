"""Ranges of a plan that any number of processes, on any hosts, work on: each range is one process's at a time.

    {folder}/{number}.lock/   lease of the process that works on a range
    {folder}/{number}.done    JSON: its result, written once

A process may join or be killed at any moment. What a killed one left is taken by another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.storage.atomic import publish_json
from draftworks.storage.lease import Lease, LeasePath
from draftworks.storage.lease_file import DEFAULT_TIMES, LeaseTimes

POLL_S = 0.2


@dataclass(frozen=True)
class Range:
    """A range that this process works on, until the iterator that yielded it goes on."""

    number: int
    lease: Lease
    done_path: Path

    def finish(self, result: Any) -> None:
        """Publish the range's result. Raises LeaseLostError if another process was given the range meanwhile."""
        self.lease.confirm()
        publish_json(self.done_path, result)


class RangeQueue:
    """The ranges 0 to `count - 1` of the plan in `folder`."""

    def __init__(self, folder: Path, count: int, times: LeaseTimes = DEFAULT_TIMES) -> None:
        self._folder = folder
        self._count = count
        self._times = times

    def take(self, while_waiting: Callable[[], None] = lambda: None) -> Iterator[Range]:
        """Yield each range that is not done and that nobody works on, until all are done or the folder is removed.

        A range that its consumer does not finish is taken again later, by this process or another. After a LeaseLostError
        in a range, the consumer may go on with the next.

        Args:
            while_waiting: called every while when others work on all ranges that are left.
        """
        left = {number: LeasePath(self._folder / f"{number}.lock", self._times) for number in range(self._count)}
        while left and self._folder.is_dir():
            taken = 0
            for number, path in list(left.items()):
                if self._is_done(number):
                    del left[number]
                    continue
                lease = _try_acquire(path)
                if lease is None:
                    continue
                try:
                    if not self._is_done(number):
                        taken += 1
                        yield Range(number, lease, self._locate(number))
                finally:
                    lease.release()
            if left and not taken:
                while_waiting()
                time.sleep(POLL_S)

    def read_results(self) -> list[Any]:
        """Return the results of all ranges, in order. Raises FileNotFoundError if one is not done."""
        return [json.loads(self._locate(number).read_text()) for number in range(self._count)]

    def _is_done(self, number: int) -> bool:
        return self._locate(number).exists()

    def _locate(self, number: int) -> Path:
        return self._folder / f"{number}.done"


def _try_acquire(path: LeasePath) -> Lease | None:
    try:
        return path.try_acquire()
    except FileNotFoundError:
        return None  # all is done, and the folder has been removed
