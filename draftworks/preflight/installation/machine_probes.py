"""This machine: versions, GPUs, engines' environments, clocks, the port of the UI, orphan processes.

Neither torch nor an engine is imported here: their own processes are asked.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Finding
from draftworks.preflight.machine import explain_start, locate_python
from draftworks.servers.environment import PROGRAM_LIBRARIES, EngineSoftware
from draftworks.sglang.environment import FIRST_CAPTURING, SGLANG
from draftworks.storage.words import list_names
from draftworks.targets.registry import Registry

_CORRECT_FIRST = "correct that, then run draftworks doctor again: it looks at this area too"
_UNEXPECTED = "look whether this user may read what is named there; if so, please report this line"


@dataclass(frozen=True)
class Probe:
    """A look at one area, which changes nothing but for files that it removes again."""

    area: str
    look: Callable[[], Iterable[Finding]]


@dataclass
class _Outcome:
    lines: list[Finding] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


def run_probes(probes: Sequence[Probe], limit_s: float) -> list[Finding]:
    """Run all probes at once and return their lines, in the order of the probes.

    A probe that has not ended after `limit_s`, or that raises, is one warning: another machine may hang, and the other
    probes are of use all the same.
    """
    outcomes = [_Outcome() for _ in probes]
    for probe, outcome in zip(probes, outcomes):
        # A daemon: one that hangs in a system call does not keep the command from ending.
        threading.Thread(target=_run, args=(probe, outcome), name=f"probe {probe.area}", daemon=True).start()
    deadline = time.monotonic() + limit_s
    return [line for probe, outcome in zip(probes, outcomes) for line in _collect(probe, outcome, deadline, limit_s)]


def _run(probe: Probe, outcome: _Outcome) -> None:
    try:
        for line in probe.look():
            outcome.lines.append(line)
    except Exception as error:
        # An error of a registry file is a problem of its own line, and several probes run into it.
        is_known = isinstance(error, DraftworksError)
        reason = str(error).partition("\n")[0] if is_known else repr(error)
        todo = _CORRECT_FIRST if is_known else _UNEXPECTED
        outcome.lines.append(Finding("warning", f"could not be looked at: {reason}", probe.area, todo))
    outcome.ended.set()


def _collect(probe: Probe, outcome: _Outcome, deadline: float, limit_s: float) -> Iterator[Finding]:
    in_time = outcome.ended.wait(max(0.0, deadline - time.monotonic()))
    yield from list(outcome.lines)
    if not in_time:
        todo = "look whether a disk, a network or a server hangs; run it again when the machine is less busy"
        yield Finding("warning", f"no answer within {limit_s:.0f} s", probe.area, todo)


GPU, CLOCKS, PROCESSES = "gpu", "clocks", "processes"
NVIDIA_SMI = "nvidia-smi"
_QUERY = ("--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader")
_ASK_TORCH = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count(), sep='|')"
_ASK_ENGINE = (
    "import importlib.metadata as m, importlib.util as u, sys; names = sys.argv[1].split(','); "
    "found = [each.version for name in names for each in m.distributions(name=name)]; "
    "print(found[0] if found else m.version(names[0])); "
    "print(*[name for name in sys.argv[2:] if u.find_spec(name) is None]); sys.stdout.flush()"
)
"""The import of the engine takes seconds, so it is done only where a target starts it."""
_TIME_ERROR = 5
"""Answer of adjtimex(2) for a clock that nothing synchronizes."""
_BYTES_OF_TIMEX = 512  # more than the structure has on any platform
_PROGRAMS = "draftworks.programs."


def probe_gpu(limit_s: float) -> Iterator[Finding]:
    """Yield the GPUs that the driver shows, and whether PyTorch sees as many. A machine without any is fine."""
    if shutil.which(NVIDIA_SMI) is None:
        yield Finding(
            "ok", f"none: {NVIDIA_SMI} is not there, so everything runs on the CPU ({os.cpu_count()} cores)", GPU
        )
        return
    try:
        asked = subprocess.run([NVIDIA_SMI, *_QUERY], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        yield Finding(
            "warning",
            f"{NVIDIA_SMI} did not answer within {limit_s:.0f} s",
            GPU,
            "look at dmesg for errors of the driver",
        )
        return
    except OSError as error:
        yield Finding("warning", f"{NVIDIA_SMI} cannot be run: {error}", GPU, "repair the driver's installation")
        return
    cards = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
    if asked.returncode or not cards:
        reason = (asked.stderr or asked.stdout).strip().splitlines()[:1] or [f"exit code {asked.returncode}"]
        todo = "repair the driver; without it everything runs on the CPU"
        yield Finding("warning", f"{NVIDIA_SMI}: {reason[0]}", GPU, todo)
        return
    for index, card in enumerate(cards):
        yield Finding("ok", f"GPU {index}: {card}", GPU)
    yield from _compare_with_torch(len(cards), limit_s)


def _compare_with_torch(cards: int, limit_s: float) -> Iterator[Finding]:
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=limit_s)
        version, cuda, seen = asked.stdout.strip().splitlines()[-1].split("|")
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        yield Finding(
            "warning",
            f"PyTorch could not be asked for its GPUs: {type(error).__name__}",
            GPU,
            "python -c 'import torch'",
        )
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"PyTorch {version} with CUDA {cuda} sees {seen} of {cards} GPUs"
    if int(seen) == cards or (visible is not None and int(seen) > 0):
        yield Finding("ok", found, GPU)
    else:
        todo = "install PyTorch for this driver's CUDA" if visible is None else "look at CUDA_VISIBLE_DEVICES"
        yield Finding("error" if int(seen) == 0 else "warning", found, GPU, todo)


def probe_engine(registry: Registry, software: EngineSoftware, limit_s: float) -> Iterator[Finding]:
    """Ask an engine's environment for its version; import the engine there if a target of the registry starts it."""
    name, area = software.name, software.key
    python, users = locate_python(registry, software), _list_users(registry, software)
    if not python.is_file():
        if users:
            todo = f"make {area}-env, or name its environment: {area}.python in registry/deployment.yaml"
            yield Finding("error", f"{python} does not exist, and is needed by {list_names(users)}", area, todo)
        else:
            yield Finding("ok", f"not installed ({python}), and no target needs it", area)
        return
    todo = f"look at: {python} -c 'import {area}'"
    script = _ASK_ENGINE + (f"; import {area}" if users else "")
    words = [",".join(software.distributions), *PROGRAM_LIBRARIES]
    try:
        asked = subprocess.run([python, "-c", script, *words], capture_output=True, text=True, timeout=limit_s, cwd="/")
    except subprocess.TimeoutExpired as error:
        version = _first_line(error.stdout)
        known = f"{name} {version} in" if version else f"{name} in"
        yield Finding("warning", f"{known} {python} did not answer within {limit_s:.0f} s", area, todo)
        return
    except OSError as error:
        yield Finding("error" if users else "warning", f"{python} cannot be run: {error}", area, f"make {area}-env")
        return
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        yield Finding("error" if users else "warning", f"{python}: {reason}", area, todo)
        return
    missing = [PROGRAM_LIBRARIES[library] for library in (lines[1].split() if len(lines) > 1 else ())]
    if missing:
        todo = f"{python} -m pip install --no-deps {' '.join(missing)}"
        lacks = f"{python} lacks {', '.join(missing)}, which capture.backend {software.captures} needs"
        yield Finding("warning", lacks, area, todo)
    yield _judge_engine(software, lines[0], python)


def _judge_engine(software: EngineSoftware, version: str, python: Path) -> Finding:
    if version.partition("+")[0] in software.versions:
        return Finding("ok", f"{software.name} {version} ({python})", software.key)
    todo = "install one of these to capture with it"
    if software is SGLANG:
        todo += f"; before {'.'.join(map(str, FIRST_CAPTURING))} it can only answer and serve"
    tested = f"{software.name} {version}: tested with {' and '.join(software.versions)}"
    return Finding("warning", tested, software.key, todo)


def _first_line(output: bytes | str | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return (text.splitlines() or [""])[0]


def _list_users(registry: Registry, software: EngineSoftware) -> list[str]:
    """Return the targets that start an engine themselves. Entries that cannot be read are told by `draftworks check`."""
    found = []
    for name in registry.list_targets():
        try:
            target = registry.load_target(name)
        except DraftworksError:
            continue
        if explain_start(target, software):
            found.append(name)
    return found


def probe_clock(has_other_hosts: bool) -> Iterator[Finding]:
    """Ask the kernel whether something synchronizes the clock; it matters where several hosts work together."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_BYTES_OF_TIMEX))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        yield Finding("ok", "whether NTP sets the clock is not known here", CLOCKS)
    elif state != _TIME_ERROR:
        yield Finding("ok", "the clock is synchronized", CLOCKS)
    elif has_other_hosts:
        todo = "switch NTP on (timedatectl set-ntp true): jobs, leases and object storage compare times of hosts"
        yield Finding("warning", "nothing synchronizes the clock", CLOCKS, todo)
    else:
        yield Finding("ok", "nothing synchronizes the clock, which matters with several hosts only", CLOCKS)


def probe_orphans() -> Iterator[Finding]:
    """Yield programs of Draftworks on this machine whose parent is gone: nothing waits for what they compute."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        name = next((word for word in words if word.startswith(_PROGRAMS)), None)
        if name is None or process.info["ppid"] != 1 or uids is None or uids.real != os.getuid():
            continue
        if name != f"{_PROGRAMS}cli":
            found.append(f"{process.info['pid']} ({name.removeprefix(_PROGRAMS)})")
    if found:
        todo = "look whether somebody started them by hand or a scheduler's job is of them; else end them: kill PID"
        yield Finding("warning", f"programs without a parent: {', '.join(found)}", PROCESSES, todo)
    else:
        yield Finding("ok", "no orphan programs", PROCESSES)


AREA = "versions"
_SHOWN = ("torch", "dagster", "transformers")


@dataclass(frozen=True)
class SupportedVersions:
    """What a checkout says of versions.

    Attributes:
        python: range of Python, such as ">=3.11".
        required: ranges of the core's libraries by name, such as ">=1.13,<1.14".
        optional: the same of extras, by extra.
        tested: exact versions by normalized name.
    """

    python: str
    required: Mapping[str, str]
    optional: Mapping[str, Mapping[str, str]]
    tested: Mapping[str, str]

    @classmethod
    def read(cls, checkout: Path) -> SupportedVersions:
        """Read pyproject.toml and constraints.txt of a checkout. Raises OSError or ValueError if one cannot be read."""
        project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
        lines = (checkout / "constraints.txt").read_text().splitlines()
        pins = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
        extras = project.get("optional-dependencies", {})
        return cls(
            project["requires-python"],
            _parse_requirements(project["dependencies"]),
            {extra: _parse_requirements(texts) for extra, texts in extras.items()},
            {_normalize(name): version.split(";")[0].strip() for name, _, version in pins},
        )


def probe_versions(checkout: Path) -> Iterator[Finding]:
    """Yield a line for Python, for the main libraries, and for each library outside of its range."""
    from packaging.specifiers import SpecifierSet

    try:
        supported = SupportedVersions.read(checkout)
    except (OSError, ValueError, KeyError) as error:
        yield Finding(
            "warning", f"supported versions are not known: {error}", AREA, "install Draftworks from a checkout"
        )
        return
    python = platform.python_version()
    if python in SpecifierSet(supported.python):
        yield Finding("ok", f"Python {python} ({sys.executable})", AREA)
    else:
        yield Finding(
            "error",
            f"Python {python}: expected {supported.python}",
            AREA,
            "make the environment again: make clean; make",
        )
    found = {name: _find_version(name) for name in supported.required}
    shown = [f"{name} {found[name]}" for name in _SHOWN if found.get(name)]
    yield Finding("ok", f"libraries: {', '.join(shown)}", AREA)
    for name, expected in supported.required.items():
        yield from _judge(name, expected, found[name], f"pip install -c constraints.txt -e {checkout}", required=True)
    for extra, ranges in supported.optional.items():
        for name, expected in ranges.items():
            todo = f"pip install -c constraints.txt -e '{checkout}[{extra}]'"
            yield from _judge(name, expected, _find_version(name), todo, required=False)
    yield from _compare_with_tested(supported)


def _judge(name: str, expected: str, found: str | None, todo: str, required: bool) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    if found is None and required:
        yield Finding("error", f"{name}: expected {expected}, found none", AREA, todo)
    elif found is not None and not SpecifierSet(expected).contains(found, prereleases=True):
        yield Finding("error", f"{name} {found}: expected {expected}", AREA, todo)


def _compare_with_tested(supported: SupportedVersions) -> Iterator[Finding]:
    """Yield one line about libraries whose version is supported but not the tested one. Local parts (+cpu) do not count."""
    others = []
    for name in supported.required:
        found, tested = _find_version(name), supported.tested.get(_normalize(name))
        if found is not None and tested is not None and found.partition("+")[0] != tested.partition("+")[0]:
            others.append(f"{name} {found} (tested: {tested})")
    if others:
        yield Finding("ok", f"supported, but not the versions of the tests: {', '.join(others)}", AREA)


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_requirements(texts: list[str]) -> dict[str, str]:
    from packaging.requirements import Requirement

    return {found.name: str(found.specifier) for found in map(Requirement, texts)}


def _normalize(name: str) -> str:
    return name.split("[")[0].strip().lower().replace("_", "-").replace(".", "-")
