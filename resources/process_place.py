"""Machine, boot and pid namespace of a process: a pid means something only there."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_FIRST_NAMESPACE = "pid:[4026531836]"
"""The initial pid namespace of every Linux machine, outside all containers."""


@dataclass(frozen=True)
class Place:
    """Identifies one process table.

    Attributes:
        machine: /etc/machine-id, empty if there is none.
        boot: id of the kernel's start; containers of one machine share it.
        namespace: the pid namespace; empty on systems without one.
    """

    host: str
    machine: str
    boot: str
    namespace: str

    @classmethod
    def here(cls) -> Place:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        machine, boot = _read_text("/etc/machine-id"), _read_text("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), machine, boot, namespace)

    def is_before_restart_of(self, other: Place) -> bool:
        """Whether this is the same machine before a reboot, so that none of its processes can be alive."""
        same = (self.host, self.machine, self.namespace) == (other.host, other.machine, other.namespace)
        return same and bool(self.machine) and self.namespace == _FIRST_NAMESPACE and self.boot != other.boot


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
        return cls(run_id, pid, _read_start(pid), Place.here())

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
        here = Place.here()
        if self.place.is_before_restart_of(here):
            return True
        if self.place != here:
            return None
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or _read_start(self.pid) != self.started
        except psutil.Error:
            return True


def _read_start(pid: int) -> float:
    """Return a process's start: on Linux clock ticks since boot, independent of clock corrections; elsewhere a time."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        raise psutil.NoSuchProcess(pid) from None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
