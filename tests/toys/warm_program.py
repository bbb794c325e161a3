"""Runs a command of Python in a process that was just forked from one with the imports, as if it had been executed.

What an executed program would have is made here: descriptors, signals, working folder, environment (also in /proc), command
line (in /proc and `ps`), `sys.path`, streams. What it would not have, such as handlers of its parent, is taken away.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import io
import os
import random
import resource
import runpy
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
HIGH = 512
"""Descriptors are moved above this one before they get their numbers."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
IMPORTED_WITH = dict(os.environ)
"""The environment of the process that imports what programs find imported."""
_OWN_PATH = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
_BASE_PATH = [entry for entry in sys.path if entry not in _OWN_PATH]
_kept: list[Any] = []
"""Memory that the kernel reads the command line from."""


@dataclass(frozen=True)
class Command:
    """The parts of a command line of Python: one of a module, a script or code, with what follows it."""

    options: frozenset[str]
    kind: str
    target: str
    args: tuple[str, ...]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Command | None:
        """None for what is no such command, or has options that are not known here."""
        options: set[str] = set()
        for at, word in enumerate(argv[1:], 1):
            if word in ("-m", "-c"):
                return (
                    cls(frozenset(options), word, argv[at + 1], tuple(argv[at + 2 :])) if at + 1 < len(argv) else None
                )
            if not word.startswith("-"):
                return cls(frozenset(options), "script", word, tuple(argv[at + 1 :]))
            if word not in ("-u", "-s", "-I", "-S", "-B"):
                return None
            options.add(word)
        return None


@dataclass(frozen=True)
class Start:
    """What the starting process gives to the program, besides descriptors."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    targets: list[int]
    """The numbers that the descriptors have in the program."""
    new_session: bool
    group: int
    umask: int
    ignored: int
    blocked: int
    limits: dict[str, list[int]]
    """Soft and hard limits by their names in `resource`."""


def list_limits() -> dict[str, list[int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: list(resource.getrlimit(getattr(resource, name))) for name in names}


def take_place(start: Start, descriptors: Sequence[int]) -> None:
    """Make of this process what the one that starts a program gives to it.

    Args:
        descriptors: open here, one for each of `start.targets`.
    """
    _place_descriptors(descriptors, start.targets)
    os.chdir(start.cwd)
    os.umask(start.umask)
    if start.new_session:
        os.setsid()
    elif start.group >= 0:
        os.setpgid(0, start.group)
    for name, limits in start.limits.items():
        if list(resource.getrlimit(getattr(resource, name))) != limits:
            resource.setrlimit(getattr(resource, name), (limits[0], limits[1]))


def become(start: Start, execute: Callable[..., NoReturn]) -> NoReturn:
    """Run the command of `start` in this process and end it as Python ends.

    Args:
        execute: what a program that replaces itself calls, in place of os.execve.
    """
    _set_signals(start.ignored, start.blocked)
    os.execve = execute  # type: ignore[assignment]
    os.execv = lambda path, argv: execute(path, argv, dict(os.environ))  # type: ignore[assignment]
    os.execvp = os.execv
    atexit._clear()  # type: ignore[attr-defined]
    run_and_end(start.argv, start.env)


def run_and_end(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run a command line of Python with an environment in this process, and end it with the code that Python ends with."""
    command = Command.parse(argv)
    assert command is not None
    code = 1
    try:
        _prepare(command, argv, env)
        _run(command)
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _run(command: Command) -> None:
    if command.kind == "-m":
        _forget(command.target)
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
    elif command.kind == "-c":
        exec(compile(command.target, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(command.target, run_name="__main__")


def _forget(module: str) -> None:
    """A module that is imported already would be run a second time, with a warning."""
    sys.modules.pop(module, None)
    package, _, name = module.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(name, None)


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prepare(command: Command, argv: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    show_in_proc(argv, env)
    _open_streams("-u" in command.options or bool(env.get("PYTHONUNBUFFERED")))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.dont_write_bytecode = "-B" in command.options or bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = list(argv)
    sys.argv = [command.target if command.kind == "script" else command.kind, *command.args]
    first = (
        str(Path(command.target).resolve().parent) if command.kind == "script" else os.getcwd() * (command.kind == "-m")
    )
    isolated = "-I" in command.options
    sys.path[:] = [*([] if isolated else [first, *_split_path(env)]), *_BASE_PATH]
    importlib.invalidate_caches()
    if any(found for place in _split_path(env) for found in Path(place).glob("*.dist-info")):
        _forget_plugins()
    if env.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore", append=True)
    tempfile.tempdir = None
    time.tzset()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in env:
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))


def _forget_plugins() -> None:
    """Entry points of these packages were not there when the register was filled: it is asked again."""
    register = sys.modules.get("draftworks.config.strategies")
    if register is not None:
        register._load_plugins.cache_clear()


def _split_path(env: Mapping[str, str]) -> list[str]:
    return [entry or os.getcwd() for entry in env["PYTHONPATH"].split(os.pathsep)] if env.get("PYTHONPATH") else []


def _place_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Give each descriptor its number, to be inherited, and close all others."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, HIGH) for each in descriptors]
    os.closerange(3, HIGH)
    for source, target in zip(high, targets, strict=True):
        os.dup2(source, target, inheritable=True)
    os.closerange(HIGH, HIGH + len(high) + 64)


def _set_signals(ignored: int, blocked: int) -> None:
    """Python's own at its start: what the parent ignores stays so, a handler does not."""
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):
            signal.signal(signum, signal.SIG_IGN if ignored >> (signum - 1) & 1 else signal.SIG_DFL)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_IGN)
    if not ignored >> (signal.SIGINT - 1) & 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(
        signal.SIG_SETMASK, {signum for signum in signal.valid_signals() if blocked >> (signum - 1) & 1}
    )


def _open_streams(unbuffered: bool) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        direct = unbuffered or name == "stderr"
        new = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=direct or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115


def show_in_proc(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Set what /proc shows as this process's command line, environment and name. Linux only (PR_SET_MM_MAP, no capability)."""
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    values = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(words + values, len(words + values))
    _kept.append(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    at = ctypes.addressof(memory)
    borders = [at, at + len(words), at + len(words), at + len(words) + len(values)]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code_and_data = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47)]
    layout = struct.pack("<11QQIi", *code_and_data, libc.sbrk(0), int(fields[28 - 3]), *borders, 0, 0, -1)
    packed = ctypes.create_string_buffer(layout, len(layout))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(packed), len(layout), 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP) failed")
    name = ctypes.create_string_buffer(os.fsencode(os.path.basename(argv[0]))[:15])
    libc.prctl(_PR_SET_NAME, ctypes.addressof(name), 0, 0, 0)
