"""What a module of tests leaves behind: processes, ports that are listened on, files of shared memory, signal handlers.

Only what is this worker's own counts: its descendants, orphans whose environment has its mark, its own sockets.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from processes import kill_all, lives

from draftworks.distributed.stop_signals import StopRequest

MARK = "DRAFTWORKS_TESTS"
SERVERS = ("warm_server.py", "warm-server", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Words in the command of what lives as long as its worker; what such a server forks does not."""
LEAVE_S = 10.0
"""How long what is about to end may still be there: only what is left after it is told."""
SHARED_MEMORY = Path("/dev/shm")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""A handler of these that stays takes the second request of a worker for a repeat of the first, and ends it at once."""
_LISTENING = "0A"


@dataclass
class LeftoverWatch:
    """Tells what has come since `begin` and is still there; what fixtures of the session have started is left out.

    A file of shared memory counts while a process of this worker uses it: whose the others are cannot be told.
    """

    leave_s: float = LEAVE_S
    _mark: bytes = b""
    _pids: set[int] = field(default_factory=set)
    _sockets: set[str] = field(default_factory=set)
    _files: set[str] = field(default_factory=set)
    _handlers: dict[signal.Signals, object] = field(default_factory=dict)
    _lasting: set[psutil.Process] = field(default_factory=set)
    _excused: list[Callable[[], Iterable[psutil.Process]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = f"{os.getpid()}.{psutil.Process().create_time():.2f}"
        os.environ[MARK] = own
        self._mark = f"{MARK}={own}".encode()

    def begin(self) -> None:
        """Take what there is now for granted."""
        self._pids, self._sockets, self._files = set(psutil.pids()), _list_sockets(), _list_files()
        self._handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Take what comes within the block for granted, with all that these processes start later."""
        pids, sockets, files = set(psutil.pids()), _list_sockets(), _list_files()
        yield
        self._lasting.update(self._find_own(set(psutil.pids()) - pids))
        self._sockets |= _list_sockets() - sockets
        self._files |= _list_files() - files

    def excuse(self, find: Callable[[], Iterable[psutil.Process]]) -> None:
        """Take the processes that `find` returns for granted, whenever they were started."""
        self._excused.append(find)

    def end(self) -> list[str]:
        """Return what is left, in words; its processes are killed, files removed, handlers set back."""
        left = self._find()
        ends = time.monotonic() + self.leave_s
        while any(left) and time.monotonic() < ends:
            gc.collect()  # a socket in a circle of objects is closed by it
            time.sleep(0.05)
            left = self._find()
        processes, sockets, files = left
        told = [_describe(each) for each in processes]
        told += [f"port {port} is still listened on by this process" for port in sockets]
        told += [f"file {SHARED_MEMORY / name}" for name in files]
        for signum, handler in self._handlers.items():
            found = signal.getsignal(signum)
            if isinstance(found, StopRequest) and found is not handler:  # libraries leave theirs
                told.append(f"a handler of {signum.name}")
                signal.signal(signum, handler or signal.SIG_DFL)  # pyright: ignore[reportArgumentType]
        kill_all(processes)
        for name in files:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
        return told

    def _find(self) -> _Left:
        processes = self._list_left(set(psutil.pids()) - self._pids)
        new = _list_sockets() - self._sockets
        return _Left(processes, _list_listening(new) if new else [], self._list_own_files(processes))

    def _list_left(self, pids: set[int]) -> list[psutil.Process]:
        found = self._find_own(pids)
        if not found:
            return []
        excused = self._lasting.union(*(find() for find in self._excused))
        return [
            each
            for each in found
            if lives(each) and each not in excused and excused.isdisjoint(_list_parents(each)) and not _is_server(each)
        ]

    def _find_own(self, pids: set[int]) -> list[psutil.Process]:
        """Return those that this process has started, or one that it has started."""
        own, found = psutil.Process(), []
        for pid in sorted(pids):
            with suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                marked = self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if marked or own in _list_parents(process):
                    found.append(process)
        return found

    def _list_own_files(self, processes: list[psutil.Process]) -> list[str]:
        new = _list_files() - self._files
        if not new:
            return []
        own = {os.getpid(), *(each.pid for each in processes)}
        return sorted(new & _list_mapped(own))


@dataclass(frozen=True)
class _Left:
    processes: list[psutil.Process]
    ports: list[str]
    files: list[str]

    def __iter__(self) -> Iterator[list]:
        return iter((self.processes, self.ports, self.files))


def is_supported() -> bool:
    """Whether this system tells what is asked here: in /proc."""
    return sys.platform == "linux"


def _list_parents(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.parents()
    return []


def _is_server(process: psutil.Process) -> bool:
    """Whether it is a server itself, and no fork of one, which has its command."""
    with suppress(psutil.Error):
        command, parent = process.cmdline(), process.parent()
        is_one = any(server in word for word in command for server in SERVERS)
        return is_one and (parent is None or parent.cmdline() != command)
    return True  # it has ended meanwhile


def _list_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    return found


def _list_listening(inodes: set[str]) -> list[str]:
    """Return the ports of those sockets that accept connections and are objects of Python.

    Libraries keep others: that of gloo stays with the caches of torch's device meshes after the end of its group.
    """
    ports: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and words[9] in inodes:
                    ports[words[9]] = str(int(words[1].rpartition(":")[2], 16))
    if not ports:
        return []
    ours = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)} - {-1}
    found = {os.readlink(f"/proc/self/fd/{number}") for number in ours}
    return sorted(port for inode, port in ports.items() if f"socket:[{inode}]" in found)


def _list_files() -> set[str]:
    found = set()
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def _list_mapped(pids: Iterable[int]) -> set[str]:
    """Return the names of the files of shared memory that processes use."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                place = line.split(maxsplit=5)[5:]
                if place and place[0].startswith(f"{SHARED_MEMORY}/"):
                    found.add(Path(place[0]).name)
    return found


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())[:300]}"
    return f"process {process.pid}"
