"""Finds and ends all processes of one job, in whatever session and on whatever host they are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil

from draftworks.storage.process_place import Place, ProcessPlace, read_start

MARK = "DRAFTWORKS_JOB_MARK"
_SCAN_INTERVAL_S = 0.1
_KILL_DEADLINE_S = 5.0


class ProcessTree:
    """The descendants of a root process, plus every process that carries the job's mark in its environment.

    Walking down from the root finds children that cleared their environment; the mark finds orphans, whose parent is no
    longer theirs. A `psutil.Process` knows its creation time, so that a reused pid is never taken for the old process.
    """

    def __init__(self, root_pid: int, mark: str) -> None:
        self._root = psutil.Process(root_pid)
        self._mark = mark
        self._known = {self._root}

    def scan(self) -> list[psutil.Process]:
        """Return the processes that are alive now, the root first. Zombies count as ended."""
        for process in list(self._known):
            with suppress(psutil.Error):
                self._known.update(process.children(recursive=True))
        self._known.update(_find_marked(self._mark))
        self._known = {process for process in self._known if is_alive(process)}
        return sorted(self._known, key=lambda process: process != self._root)

    def end(self, grace_s: float) -> list[psutil.Process]:
        """Send SIGTERM, wait up to `grace_s`, then send SIGKILL. Return the processes that still live (normally none).

        An interrupt while waiting for the orderly end skips the rest of the grace, kills, and passes on.
        """
        try:
            self._ask_to_end(grace_s)
        except BaseException:
            self.kill()
            raise
        return self.kill()

    def kill(self) -> list[psutil.Process]:
        """Send SIGKILL until no process is left, for at most five seconds (a process in the kernel cannot be killed)."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while (alive := self.scan()) and time.monotonic() < deadline:
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(_SCAN_INTERVAL_S)  # not psutil's wait: it would take the root's exit code from its Popen
        return alive

    def _ask_to_end(self, grace_s: float) -> None:
        """Send SIGTERM to the root, which passes it to its children; to all others directly once the root has ended."""
        deadline = time.monotonic() + grace_s
        signalled: set[psutil.Process] = set()
        while (alive := self.scan()) and time.monotonic() < deadline:
            for process in {self._root} if self._root in alive else set(alive) - signalled:
                if process not in signalled:
                    signalled.add(process)
                    with suppress(psutil.Error):
                        process.terminate()
            time.sleep(_SCAN_INTERVAL_S)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _find_marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                yield process


@dataclass(frozen=True)
class RunProcess:
    """The process that runs a Dagster run.

    Attributes:
        run_id: the run. Dagster copies tags to the run of a retry, so the tag alone does not say it.
        started: start time of the process, to recognise a reused pid.
    """

    run_id: str
    pid: int
    started: float
    place: Place

    @classmethod
    def of(cls, run_id: str, pid: int) -> RunProcess:
        """Return the record of a process on this machine. Raises psutil.Error if there is no such process."""
        try:
            return cls(run_id, pid, read_start(pid), Place.here())
        except ProcessLookupError:
            raise psutil.NoSuchProcess(pid) from None

    @classmethod
    def from_tag(cls, run_id: str, tag: str | None) -> RunProcess | None:
        """Return the process in a run's tag; None if the run has no tag, or only that of the run that it retries."""
        try:
            values = json.loads(tag or "")
            found = cls(**{**values, "place": Place(**values["place"])})
        except (ValueError, TypeError, KeyError):
            return None
        return found if found.run_id == run_id else None

    def to_tag(self) -> str:
        return json.dumps(asdict(self))

    def is_dead(self) -> bool | None:
        """Whether the process is gone; None if this machine or container cannot know."""
        return ProcessPlace(self.pid, self.started, self.place).is_dead()
