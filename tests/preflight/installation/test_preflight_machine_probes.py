"""GPU, engines and processes: what is there, what is wrong with it, and what hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from draftworks.capture.software import ENGINE_SOFTWARE
from draftworks.preflight.installation import machine_probes
from draftworks.preflight.installation.machine_probes import (
    probe_clock,
    probe_engine,
    probe_gpu,
    probe_orphans,
)
from draftworks.servers.environment import EngineSoftware
from draftworks.targets.registry import Registry

CARD = "NVIDIA H200, 143771 MiB, 0 MiB, 570.1"


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one that is searched."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


def test_a_machine_without_a_gpu_is_fine(machine: Path):
    [line] = probe_gpu(5)
    assert (line.severity, "CPU" in line.text) == ("ok", True)


@pytest.mark.parametrize(
    ("seen", "states"), [("2", ["ok", "ok", "ok"]), ("1", ["ok", "ok", "warning"]), ("0", ["ok", "ok", "error"])]
)
def test_gpus_that_pytorch_does_not_see_are_told(machine: Path, monkeypatch: pytest.MonkeyPatch, seen: str, states):
    write_program(machine / "nvidia-smi", f"echo '{CARD}'; echo '{CARD}'")
    python = write_program(machine / "python", f"echo '2.13.0|12.8|{seen}'")
    monkeypatch.setattr(machine_probes.sys, "executable", str(python))
    found = list(probe_gpu(5))
    assert [line.severity for line in found] == states
    assert f"sees {seen} of 2 GPUs" in found[-1].text


@pytest.mark.parametrize("body", ["echo 'driver mismatch' >&2; exit 18", "exec /bin/sleep 2000"])
def test_a_driver_that_fails_or_hangs_is_a_warning(machine: Path, body: str):
    write_program(machine / "nvidia-smi", body)
    [line] = probe_gpu(0.5)
    assert (line.severity, bool(line.remedy)) == ("warning", True)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    engines = "".join(f"{key}: {{python: ../{key}/python}}\n" for key in ENGINE_SOFTWARE)
    (tmp_path / "registry" / "deployment.yaml").write_text(engines)
    return Registry(tmp_path / "registry")


def need(registry: Registry, backend: str) -> None:
    (registry.root / "targets" / "a.yaml").write_text(f"model: m\ndataset: d\ncapture: {{backend: {backend}}}\n")


@pytest.fixture(params=["sglang", "vllm"])
def software(request: pytest.FixtureRequest) -> EngineSoftware:
    return ENGINE_SOFTWARE[request.param]


@pytest.mark.parametrize(
    ("body", "needed", "state", "words"),
    [
        (None, False, "ok", "no target needs it"),
        (None, True, "error", "is needed by a"),
        ("echo TESTED", True, "ok", "NAME TESTED"),
        ("echo 0.4.1", True, "warning", "NAME 0.4.1: tested with"),
        ("echo 'ImportError: no CUDA' >&2; exit 1", True, "error", "ImportError: no CUDA"),
        ("echo 'ImportError: no CUDA' >&2; exit 1", False, "warning", "ImportError: no CUDA"),
        ("echo TESTED; exec sleep 60", True, "warning", "did not answer within"),
    ],
)
def test_an_engine_is_asked_in_its_own_environment(
    registry: Registry, software: EngineSoftware, body: str | None, needed: bool, state: str, words: str
):
    if needed:
        need(registry, software.captures)
    if body is not None:
        write_program(registry.root.parent / software.key / "python", body.replace("TESTED", software.versions[0]))
    [line] = probe_engine(registry, software, 1.0)
    words = words.replace("NAME", software.name).replace("TESTED", software.versions[0])
    assert (line.severity, words in line.text) == (state, True), line


def test_libraries_that_an_engine_lacks_are_named_with_the_command(registry: Registry, software: EngineSoftware):
    need(registry, software.captures)
    said = f"echo {software.versions[0]}; echo pyarrow dagster_pipes"
    write_program(registry.root.parent / software.key / "python", said)
    found = list(probe_engine(registry, software, 5))
    assert [line.severity for line in found] == ["warning", "ok"]
    assert "pip install --no-deps pyarrow dagster-pipes" in found[0].remedy


def test_a_clock_that_nothing_sets_matters_between_hosts_only(monkeypatch: pytest.MonkeyPatch):
    class Kernel:
        def __init__(self, state: int) -> None:
            self.adjtimex = lambda buffer: state

    for state, others, expected in ((0, True, "ok"), (5, True, "warning"), (5, False, "ok"), (-1, True, "ok")):
        monkeypatch.setattr(machine_probes.ctypes, "CDLL", lambda *_, state=state, **__: Kernel(state))
        assert [line.severity for line in probe_clock(others)] == [expected]
    monkeypatch.undo()
    assert [line.severity for line in probe_clock(False)] == ["ok"]


def test_a_program_whose_parent_is_gone_is_found(monkeypatch: pytest.MonkeyPatch):
    """The program is real, but not its lack of a parent: who takes orphans over differs between machines."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "draftworks.programs.train"])
    iterate = psutil.process_iter

    def without_parent(attributes: list[str]) -> Iterator[psutil.Process]:
        for process in iterate(attributes):
            if process.pid == child.pid:
                process.info["ppid"] = 1
            yield process

    monkeypatch.setattr(psutil, "process_iter", without_parent)
    try:
        [line] = probe_orphans()
        assert (line.severity, f"{child.pid} (train)" in line.text) == ("warning", True)
    finally:
        child.kill()
        child.wait()


def test_programs_of_this_process_are_no_orphans():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "draftworks.programs.train"])
    try:
        assert not any(str(child.pid) in line.text for line in probe_orphans())
    finally:
        child.kill()
        child.wait()
