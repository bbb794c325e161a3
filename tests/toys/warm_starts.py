"""Starts programs that would spend their time on imports from a process that has them: `make test WARM=0` does without.

`install` replaces what `subprocess` and `multiprocessing` call to fork and execute. Commands of this interpreter that are worth
it become children without exec, made by a server (`warm_server`) that each process has for what it starts; every other command
is executed as ever.

A program that changes a module before others import from it (`failing_programs`) must not be warm: they have done so.
"""

from __future__ import annotations

import _posixsubprocess
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import warm_program
from warm_program import ROOT, Command, Start

_execute: Callable[..., int] = _posixsubprocess.fork_exec
_execve: Callable[..., NoReturn] = os.execve
_ARGUMENTS = (
    *(
        "args",
        "executables",
        "close_fds",
        "pass_fds",
        "cwd",
        "env",
        "stdin",
        "p2cwrite",
        "c2pread",
        "stdout",
        "errread",
        "stderr",
    ),
    *(
        "errpipe_read",
        "errpipe_write",
        "restore_signals",
        "new_session",
        "group",
        "gid",
        "groups",
        "uid",
        "umask",
        "preexec_fn",
    ),
)
"""Of fork_exec in CPython 3.11 and later; in some one more follows."""
_MODULES = re.compile(r"torch\.distributed\.run|draftworks(\..+)?|dagster(\._daemon)?|frame_program")
_WORKER = r"import sys;exec\(eval\(sys\.stdin\.readline\(\)\)\)$"
"""What pytest-xdist's workers run."""
_CODE = re.compile(rf"from multiprocessing\.(forkserver|spawn) import |{_WORKER}")
_SCRIPTS = {Path(sys.executable).parent / name for name in ("draftworks", "dagster", "torchrun")}
_SCRIPT_FOLDERS = (ROOT / "tests", ROOT / "benchmarks")
_SHIM = ROOT / "draftworks" / "distributed" / "stop_signals.py"
_SET_ANEW = re.compile(
    r"PYTHON(PATH|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS)|TORCH_?ELASTIC_.*|TORCH_NCCL_.*|TORCHINDUCTOR_CACHE_DIR"
    r"|HF_HUB_DISABLE_PROGRESS_BARS|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)
_READ_BY_IMPORTS = re.compile(
    r"(PYTHON|LD_|MKL_|KMP_|ATEN_|TORCH|PYTORCH|HF_|TRANSFORMERS_|LC_|LANG|NO_COLOR|FORCE_COLOR)"
)
"""Variables that are read at an interpreter's start or by an import: one that differs needs a real start."""
_FORKSERVER = "from multiprocessing.forkserver import "
_STARTERS = re.compile(
    r"torch\.distributed\.run|/bin/torchrun|/bin/draftworks|/bin/dagster|-m (draftworks|dagster)\b(?!\.programs)"
    rf"|-c {_WORKER}"
)
_serving: list[bool] = []
"""Not empty while a server is forked."""
_waiting: dict[int, Mapping[str, str]] = {}
"""The environment for the server of a process that has none yet, by the process's id."""
_served: dict[int, _Server] = {}
"""The server of this process, by its own id: a fork of it must not ask."""
_executed: list[list[str]] = []
"""Commands that were worth a warm start and were executed, since they differ from what the server can become."""


class _Server:
    """The end that asks, and the environment of the imports."""

    def __init__(
        self, requests: socket.socket, env: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._requests = requests
        self.process = process
        self._lock = threading.Lock()
        self.env = env

    def start(self, start: Start, descriptors: Sequence[int]) -> int:
        text = json.dumps(dataclasses.asdict(start)).encode()
        with self._lock:
            socket.send_fds(self._requests, [len(text).to_bytes(8, "little")], descriptors)
            self._requests.sendall(text)
            return int.from_bytes(self._requests.recv(8), "little")


def install() -> None:
    """Start warm what can be, from now on and in this process; its server begins with the first such start."""
    if os.getpid() not in _served:
        _waiting.setdefault(os.getpid(), {**os.environ, "OMP_NUM_THREADS": "1"})
    _posixsubprocess.fork_exec = subprocess._fork_exec = _start  # type: ignore[attr-defined]


def install_unless_unwanted() -> None:
    """Start warm what can be, unless the session was asked for real starts (WARM=0)."""
    if os.environ.get("WARM", "1") != "0":
        install()
    else:
        uninstall()


def _begin_server(env: Mapping[str, str]) -> None:
    requests, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno())]
    # Arrow would have a thread of its own, which a fork loses.
    env = {**env, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    assert requests.recv(5) == b"ready", "the server of warm starts did not start"
    _served[os.getpid()] = _Server(requests, env, process)


def find_server() -> int | None:
    """The id of the process that has executed its imports for this one."""
    server = _served.get(os.getpid())
    return server.process.pid if server is not None and server.process is not None else None


def list_executed() -> list[list[str]]:
    """Commands worth a warm start that this process has executed although it has a server."""
    return list(_executed)


def _install(requests: socket.socket, env: Mapping[str, str]) -> None:
    _served[os.getpid()] = _Server(requests, env)
    _posixsubprocess.fork_exec = subprocess._fork_exec = _start  # type: ignore[attr-defined]


def uninstall() -> None:
    """Execute everything again. A server ends when this process does."""
    _posixsubprocess.fork_exec = subprocess._fork_exec = _execute  # type: ignore[attr-defined]


def become(start: Start, descriptors: Sequence[int]) -> NoReturn:
    """Become a program in a process just forked. If it is one that starts others, these are warm too."""
    _served.clear()
    _serving.clear()  # the server that has forked this process is one that a process has for itself
    uninstall()
    warm_program.take_place(start, descriptors)
    if _STARTERS.search(" ".join(start.argv)):
        _serve_own()
    if _FORKSERVER in " ".join(start.argv):
        os.register_at_fork(after_in_child=_serve_own)
    warm_program.become(start, _replace)


def _serve_own() -> None:
    """Have a server for what this process starts; a server forked here has none."""
    import warm_server

    if not _serving:
        _serving.append(True)
        requests = warm_server.fork_server()
        _serving.clear()
        _install(requests, warm_program.IMPORTED_WITH)


def _replace(path: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """os.execve of a program that is worth it: the process stays."""
    if _is_warm([str(word) for word in argv], env, os.getcwd()):
        warm_program.run_and_end([str(word) for word in argv], env)
    _execve(path, argv, env)


def _start(*given: Any) -> int:
    """In place of `_posixsubprocess.fork_exec`, whose arguments it gets; returns the pid."""
    asked = dict(zip(_ARGUMENTS, given, strict=False))
    argv = _name_interpreter([os.fsdecode(word) for word in asked["args"]])
    env = dict(os.environ) if asked["env"] is None else dict(os.fsdecode(each).split("=", 1) for each in asked["env"])
    cwd = os.path.abspath(os.fsdecode(asked["cwd"] or os.getcwd()))
    plain = asked["close_fds"] and all(asked[name] is None for name in ("gid", "groups", "uid", "preexec_fn"))
    if not (plain and os.path.isdir(cwd) and _is_warm(argv, env, cwd) and _has_server()):
        if os.getpid() in _served and _is_worth(argv):
            _executed.append(argv)
        return _execute(*given)
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    standard = [own if asked[name] < 0 else asked[name] for own, name in enumerate(("stdin", "stdout", "stderr"))]
    passed = [number for number in asked["pass_fds"] if number != asked["errpipe_write"]]
    start = Start(
        argv=argv,
        env=env,
        cwd=cwd,
        targets=[0, 1, 2, *passed],
        new_session=bool(asked["new_session"]),
        group=asked["group"],
        umask=asked["umask"] if asked["umask"] >= 0 else int(status["Umask"], 8),
        ignored=int(status["SigIgn"], 16),
        blocked=int(status["SigBlk"], 16),
        limits=warm_program.list_limits(),
    )
    return _served[os.getpid()].start(start, [*standard, *passed])


def _name_interpreter(argv: list[str]) -> list[str]:
    """The command that the kernel makes of one that begins with a script of this environment."""
    if not argv or Path(argv[0]) not in _SCRIPTS:
        return argv
    interpreter = Path(argv[0]).read_text().partition("\n")[0].removeprefix("#!")
    return [sys.executable if os.path.samefile(interpreter, sys.executable) else interpreter, *argv]


def _has_server() -> bool:
    """The kernel tells a child of the death of the thread that began the server: only the main one does."""
    pid = os.getpid()
    if pid in _waiting and threading.current_thread() is threading.main_thread():
        _begin_server(_waiting.pop(pid))
    return pid in _served


def _is_warm(argv: Sequence[str], env: Mapping[str, str], folder: str) -> bool:
    """Whether a command is worth it, and would import what is imported already."""
    if not _is_worth(argv):
        return False
    if any(_differs(name, env) for name in {*env, *_imported_with()} if not _SET_ANEW.fullmatch(name)):
        return False
    if env.get("PYTHONWARNINGS", "ignore") != "ignore" or not env.get("OMP_NUM_THREADS", "").isdigit():
        return False
    places = [folder, *env.get("PYTHONPATH", "").split(os.pathsep)]
    return not any(_is_other_product(place) for place in places)


def _is_worth(argv: Sequence[str]) -> bool:
    """Whether a command is one of this interpreter whose start is mostly imports."""
    command = Command.parse(argv) if argv and argv[0] == sys.executable else None
    if command is None:
        return False
    if command.kind == "-m":
        return _MODULES.fullmatch(command.target) is not None
    if command.kind == "-c":
        return _CODE.match(command.target) is not None
    if Path(command.target) == _SHIM:
        return _is_worth(command.args[1:])
    path = Path(command.target)
    return path in _SCRIPTS or any(each in path.parents for each in _SCRIPT_FOLDERS)


def _imported_with() -> Mapping[str, str]:
    server = _served.get(os.getpid())
    return _waiting.get(os.getpid(), warm_program.IMPORTED_WITH) if server is None else server.env


def _differs(name: str, env: Mapping[str, str]) -> bool:
    return _READ_BY_IMPORTS.match(name) is not None and env.get(name) != _imported_with().get(name)


def _is_other_product(place: str) -> bool:
    other = Path(place or ".") / "draftworks"
    return other.is_dir() and not other.samefile(ROOT / "draftworks")
