"""`draftworks check` says what of this machine a streamed training would fail for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftworks.preflight import streams
from draftworks.storage.shared_folder import Mount

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
    assert "is on a network file system (nfs4, on /mnt/all)" in error


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
    assert "this Python: No module named 'mooncake'. Install draftworks[mooncake]" in error


def test_an_unknown_kind_of_store_names_those_that_there_are(fleet):
    (error,) = check(fleet, {"store": {"kind": "s3"}})
    assert "streaming.store.kind: " in error
    assert "expected one of shared_dir, mooncake, found 's3'" in error


@pytest.mark.parametrize(
    ("limit", "kind"), [(8 * 2 * 4 * 128 * 2 - 1, "errors"), (8 * 10 * 4 * 128 * 2, "warnings"), (1 << 30, None)]
)
def test_bytes_below_a_global_batch_are_reported(fleet, limit: int, kind: str | None):
    """A token has 3 taps and `last` of 128 values in bfloat16; a batch has 8 samples of more than 10 tokens."""
    fleet.write(streaming={"watermark": {"samples": None, "bytes": limit}})
    found = fleet.check()
    told = {key for key in ("errors", "warnings") if any("watermark.bytes" in text for text in getattr(found, key))}
    assert told == ({kind} if kind else set()), found


@pytest.mark.parametrize(
    ("listen", "there"),
    [("127.0.0.1:0", True), ("0.0.0.0:7000", True), ("192.0.2.1:0", False)],
)
def test_an_address_that_this_machine_lacks_is_an_error(fleet, listen: str, there: bool):
    told = [error for error in check(fleet, {"control": {"listen": listen}}) if "streaming.control.listen" in error]
    assert len(told) == (not there)
    assert all(f"on which the launcher runs, found {listen}" in error for error in told)
