"""Folders are tried with real files: without the right to write, full, or without locks they are a problem."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest

from draftworks.preflight.installation.deployment_probes import (
    WrittenFolder,
    list_written_folders,
    probe_clock_of_folder,
    probe_disk,
    probe_permissions,
)
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
