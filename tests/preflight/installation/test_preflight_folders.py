"""Folders are tried with real files: without the right to write, full, or without locks they are a problem.
GPU, SGLang and processes: what is there, what is wrong with it, and what hangs.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from draftworks.preflight.installation import machine_probes
from draftworks.preflight.installation.deployment_probes import (
    WrittenFolder,
    list_written_folders,
    probe_clock_of_folder,
    probe_disk,
    probe_permissions,
)
from draftworks.preflight.installation.machine_probes import (
    probe_clock,
    probe_gpu,
    probe_orphans,
    probe_sglang,
)
from draftworks.sglang.environment import SGLANG_VERSIONS
from draftworks.targets.registry import Registry


def set_free(monkeypatch: pytest.MonkeyPatch, free: int, files: int = 1_000_000) -> None:
    """Let every file system have room for so many bytes, of 100 GB, and so many more files."""
    blocks = (4096, 1, 100 << 30, free, free)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*blocks, 2_000_000, files, files, 0, 255)))


def states(lines) -> list[str]:
    return [line.severity for line in lines]


def list_tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.parametrize("exists", [True, False])
def test_a_sound_folder_is_ok_and_nothing_of_the_trial_stays(tmp_path: Path, exists: bool):
    folder = WrittenFolder("var", tmp_path / "var")
    if exists:
        folder.path.mkdir()
        (folder.path / "kept").write_text("as it was")
    before = list_tree(tmp_path)
    [line] = probe_permissions(folder)
    assert line.severity == "ok"
    assert ("does not exist yet" in line.text) is not exists
    assert list_tree(tmp_path) == before


def test_a_file_in_the_way_is_a_problem(tmp_path: Path):
    (tmp_path / "file").write_text("")
    [line] = probe_permissions(WrittenFolder("var", tmp_path / "file" / "var"))
    assert line.severity == "error"
    assert f"{tmp_path / 'file'} is a file" in line.text


def test_a_folder_that_cannot_be_written_to_is_a_problem():
    """The kernel lets nobody, root included, make a file in `/sys`."""
    [line] = probe_permissions(WrittenFolder("var", Path("/sys")))
    assert line.severity == "error"
    assert re.search(
        "var /sys: cannot be written to: (Permission denied|Read-only file system|Operation not)", line.text
    )
    assert line.remedy
    [line] = probe_permissions(WrittenFolder("cache", Path("/sys"), is_needed=False))
    assert line.severity == "warning"


@pytest.mark.parametrize(
    ("free", "needed", "other"),
    [
        (0, "error", "warning"),
        ((1 << 30) - 1, "error", "warning"),
        (1 << 30, "warning", "warning"),
        ((20 << 30) - 1, "warning", "warning"),
        (20 << 30, "ok", "ok"),
    ],
)
def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, needed: str, other: str):
    set_free(monkeypatch, free)
    assert states(probe_disk(WrittenFolder("var", tmp_path))) == [needed]
    assert states(probe_disk(WrittenFolder("cache", tmp_path, is_needed=False))) == [other]


def test_a_disk_without_room_for_files_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_free(monkeypatch, 50 << 30, files=20)
    found = list(probe_disk(WrittenFolder("var", tmp_path)))
    assert "room for 20 more files" in found[0].text
    assert states(found) == ["error", "ok"]


def test_locks_that_exclude_nobody_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    [line] = probe_permissions(WrittenFolder("var", tmp_path))
    assert (line.severity, "no locks (flock)" in line.text) == ("error", True)


@pytest.mark.parametrize(("ahead_s", "state"), [(0.0, "ok"), (30.0, "warning"), (-30.0, "warning"), (3600.0, "error")])
def test_a_clock_that_differs_from_that_of_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, state: str
):
    """The folder counts as one of a network; its server gives every file a time that is `ahead_s` behind."""
    from draftworks.preflight.installation import deployment_probes
    from draftworks.storage.shared_folder import Mount as MountedAt

    monkeypatch.setattr(deployment_probes, "find_mount", lambda path: MountedAt(tmp_path, "nfs4"))
    stat = Path.stat

    def behind(path: Path, **given):
        found = list(stat(path, **given))
        found[8] -= ahead_s
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", behind)
    [line] = probe_clock_of_folder(WrittenFolder("var", tmp_path))
    assert line.severity == state
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_the_folders_are_those_that_runs_write_to(tmp_path: Path):
    (tmp_path / "deployment.yaml").write_text("var: work\nfeatures: {kind: shared_dir, root: shared}\n")
    env = {"DAGSTER_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hub")}
    found = {each.name: each.path for each in list_written_folders(Registry(tmp_path), env, tmp_path)}
    assert found == {
        "var": tmp_path / "work",
        "feature store": tmp_path / "shared",
        "DAGSTER_HOME": tmp_path / "home",
        "Hugging Face cache": tmp_path / "hub",
    }


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
    assert (line.state, "CPU" in line.found) == ("ok", True)


@pytest.mark.parametrize(
    ("seen", "states"), [("2", ["ok", "ok", "ok"]), ("1", ["ok", "ok", "warning"]), ("0", ["ok", "ok", "problem"])]
)
def test_gpus_that_pytorch_does_not_see_are_told(machine: Path, monkeypatch: pytest.MonkeyPatch, seen: str, states):
    write_program(machine / "nvidia-smi", f"echo '{CARD}'; echo '{CARD}'")
    python = write_program(machine / "python", f"echo '2.13.0|12.8|{seen}'")
    monkeypatch.setattr(machine_probes.sys, "executable", str(python))
    found = list(probe_gpu(5))
    assert [line.state for line in found] == states
    assert f"sees {seen} of 2 GPUs" in found[-1].found


@pytest.mark.parametrize("body", ["echo 'driver mismatch' >&2; exit 18", "exec /bin/sleep 2000"])
def test_a_driver_that_fails_or_hangs_is_a_warning(machine: Path, body: str):
    write_program(machine / "nvidia-smi", body)
    [line] = probe_gpu(0.5)
    assert (line.state, bool(line.todo)) == ("warning", True)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    (tmp_path / "registry" / "deployment.yaml").write_text("sglang: {python: ../sglang/python}\n")
    return Registry(tmp_path / "registry")


def need_sglang(registry: Registry) -> None:
    (registry.root / "targets" / "a.yaml").write_text("model: m\ndataset: d\ncapture: {backend: sglang}\n")


@pytest.mark.parametrize(
    ("body", "needed", "state", "words"),
    [
        (None, False, "ok", "no target needs it"),
        (None, True, "problem", "is needed by a"),
        (f"echo {SGLANG_VERSIONS[0]}", True, "ok", f"SGLang {SGLANG_VERSIONS[0]}"),
        ("echo 0.4.1", True, "warning", "SGLang 0.4.1: tested with"),
        ("echo 'ImportError: no CUDA' >&2; exit 1", True, "problem", "ImportError: no CUDA"),
        ("echo 'ImportError: no CUDA' >&2; exit 1", False, "warning", "ImportError: no CUDA"),
        ("echo 0.5.23; exec sleep 60", True, "warning", "did not answer within"),
    ],
)
def test_sglang_is_asked_in_its_own_environment(registry: Registry, body, needed: bool, state: str, words: str):
    if needed:
        need_sglang(registry)
    if body is not None:
        write_program(registry.root.parent / "sglang" / "python", body)
    [line] = probe_sglang(registry, 1.0)
    assert (line.state, words in line.found) == (state, True), line


def test_libraries_that_sglang_lacks_are_named_with_the_command(registry: Registry):
    need_sglang(registry)
    write_program(registry.root.parent / "sglang" / "python", f"echo {SGLANG_VERSIONS[0]}; echo pyarrow dagster_pipes")
    found = list(probe_sglang(registry, 5))
    assert [line.state for line in found] == ["warning", "ok"]
    assert "pip install --no-deps pyarrow dagster-pipes" in found[0].todo


def test_a_clock_that_nothing_sets_matters_between_hosts_only(monkeypatch: pytest.MonkeyPatch):
    class Kernel:
        def __init__(self, state: int) -> None:
            self.adjtimex = lambda buffer: state

    for state, others, expected in ((0, True, "ok"), (5, True, "warning"), (5, False, "ok"), (-1, True, "ok")):
        monkeypatch.setattr(machine_probes.ctypes, "CDLL", lambda *_, state=state, **__: Kernel(state))
        assert [line.state for line in probe_clock(others)] == [expected]
    monkeypatch.undo()
    assert [line.state for line in probe_clock(False)] == ["ok"]


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
        assert (line.state, f"{child.pid} (train)" in line.found) == ("warning", True)
    finally:
        child.kill()
        child.wait()


def test_programs_of_this_process_are_no_orphans():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "draftworks.programs.train"])
    try:
        assert not any(str(child.pid) in line.found for line in probe_orphans())
    finally:
        child.kill()
        child.wait()
