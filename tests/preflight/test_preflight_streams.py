"""`draftworks check` says what of this machine a streamed training would fail for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftworks.preflight import streams
from draftworks.storage.file_systems import Mount

MOONCAKE = {"store": {"kind": "mooncake"}}


def check(fleet, streaming: dict) -> list[str]:
    fleet.write(streaming=streaming)
    return fleet.check().errors


def test_a_local_folder_is_in_order(fleet):
    assert check(fleet, {"control_folder": "control"}) == []


def test_a_database_on_a_network_file_system_is_an_error(fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "find_mount", lambda path: Mount(Path("/mnt/all"), "nfs4"))
    (error,) = check(fleet, {})
    assert "var of the deployment" in error
    assert "is on a network file system (nfs4, mounted on /mnt/all)" in error


def test_a_control_folder_that_cannot_be_written_is_an_error(fleet, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (error,) = check(fleet, {"control_folder": str(tmp_path / "file" / "control")})
    assert "streaming.control_folder: expected a folder that this user may write to" in error


def test_a_python_without_mooncake_is_an_error(fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mooncake'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (error,) = check(fleet, MOONCAKE)
    assert f"{python} cannot import Mooncake: ModuleNotFoundError: No module named 'mooncake'. Install" in error


def test_an_unknown_kind_of_store_names_those_that_there_are(fleet):
    (error,) = check(fleet, {"store": {"kind": "s3"}})
    assert "streaming.store.kind: " in error
    assert "'shared_dir' or 'mooncake'" in error
