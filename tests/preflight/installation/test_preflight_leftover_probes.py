"""Locks, interrupted results and stores of other versions are told; looking changes none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from retention_toys import make_result

from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.deployment_probes import OLD_S, probe_leftovers, probe_stores
from draftworks.storage.lease import LeasePath


def list_states(lines: list[Finding]) -> list[str]:
    return [line.severity for line in lines]


@pytest.fixture
def var(tmp_path: Path) -> Path:
    make_result(tmp_path, "x_draft")
    return tmp_path


def test_what_is_as_it_should_be_is_ok(var: Path):
    held = LeasePath(var / "x_draft" / "a" / ".lock").try_acquire()
    assert held is not None
    [line] = probe_leftovers(var)
    assert "1 held on this machine, none of a dead process" in line.text
    held.release()
    [line] = probe_stores(var)
    assert "1 current results, all of this version" in line.text
    assert list_states(list(probe_stores(var / "none"))) == ["ok"]


def test_the_lock_of_a_process_that_was_killed_is_told_and_left(var: Path):
    lock = var / "y_draft" / "a" / ".lock"
    lock.parent.mkdir(parents=True)
    code = f"from pathlib import Path; from draftworks.storage.lease import LeasePath; import os, signal\n\
LeasePath(Path({str(lock)!r})).try_acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code])
    before = {path: path.read_bytes() for path in lock.iterdir()}
    [line] = probe_leftovers(var)
    assert "1 of processes that are gone" in line.text
    assert {path: path.read_bytes() for path in lock.iterdir()} == before


def test_a_lock_that_another_host_does_not_renew_is_a_warning(var: Path):
    lock = var / "x_draft" / "a" / ".lock"
    held = LeasePath(lock).try_acquire()
    assert held is not None
    [file] = [path for path in lock.iterdir() if path.name.isdigit()]
    values = json.loads(file.read_text())
    values["place"] = {"host": "elsewhere", "machine": "m", "boot": "b", "namespace": "n"}
    held.release()
    file.write_text(json.dumps(values))
    assert list_states(list(probe_leftovers(var))) == ["ok"]
    long_ago = time.time() - 3600
    for path in (file, lock):
        os.utime(path, (long_ago, long_ago))
    found = list(probe_leftovers(var))
    assert list_states(found) == ["warning", "ok"]
    assert "elsewhere" in found[0].text


def test_an_old_interrupted_result_is_a_warning(var: Path):
    partial = var / "x_draft" / "a" / "0123456789abcdef.partial"
    partial.mkdir()
    assert list_states(list(probe_leftovers(var))) == ["ok"]
    long_ago = time.time() - OLD_S - 60
    os.utime(partial, (long_ago, long_ago))
    assert list_states(list(probe_leftovers(var))) == ["ok", "warning"]


@pytest.mark.parametrize(("text", "words"), [('{"schema": 99}', "(schema 99)"), ("{", "cannot be read")])
def test_a_record_of_another_version_or_a_damaged_one_is_a_problem(var: Path, text: str, words: str):
    [record] = var.glob("x_draft/a/*/artifact.json")
    record.write_text(text)
    [line] = probe_stores(var)
    assert (line.severity, words in line.text) == ("error", True)


def test_a_store_by_target_name_that_no_link_leads_to_is_doubtful(var: Path):
    for name in ("0123456789abcdef", "tiny"):
        (var / "feature_store" / name).mkdir(parents=True)
    (var / "feature_store" / "aaaaaaaaaaaaaaaa").symlink_to("tiny")
    assert len(list(probe_stores(var))) == 1
    (var / "feature_store" / "old").mkdir()
    found = list(probe_stores(var))
    assert list_states(found) == ["ok", "warning"]
    assert "nothing reads: old" in found[1].text
