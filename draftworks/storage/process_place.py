"""Machine, boot and pid namespace of a process: a pid means something only there. Imports psutil only where it must."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
class ProcessPlace:
    """One process of one process table.

    Attributes:
        started: start time of the process, to recognise a reused pid; see `read_start`.
    """

    pid: int
    started: float
    place: Place

    @classmethod
    def own(cls) -> ProcessPlace:
        """Return the calling process, at the place where it was first asked for."""
        return _read_process(os.getpid())

    def is_dead(self, here: Place | None = None) -> bool | None:
        """Whether the process is gone; None if this machine or container cannot know.

        Args:
            here: the place of the calling process, if it is known.
        """
        here = here or Place.here()
        if self.place.is_before_restart_of(here):
            return True
        if self.place != here:
            return None
        return is_process_dead(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.place.host}"


@cache
def _read_process(pid: int) -> ProcessPlace:
    return ProcessPlace(pid, read_start(pid), Place.here())


def is_process_dead(pid: int, started: float) -> bool:
    """Whether the process of this machine that had this pid and start time is gone, or is a zombie."""
    if sys.platform != "linux":
        import psutil

        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE or read_start(pid) != started
        except psutil.Error:
            return True
    fields = _read_stat(pid)
    return fields is None or fields[0] in ("Z", "X") or float(fields[19]) != started


def read_start(pid: int) -> float:
    """Return a process's start: on Linux clock ticks since boot, independent of clock corrections; elsewhere a time.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if sys.platform != "linux":
        import psutil

        try:
            return psutil.Process(pid).create_time()
        except psutil.Error as error:
            raise ProcessLookupError(pid) from error
    fields = _read_stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return float(fields[19])


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
