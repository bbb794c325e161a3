"""A job's host sees the folder of who started it, or says in one sentence that it does not."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftworks.errors import ConfigError
from draftworks.storage import shared_folder
from draftworks.storage.shared_folder import (
    FolderToken,
    check_shared_folder,
    check_shared_folder_of_job,
    describe_skew,
    write_folder_token,
)

HOST = socket.gethostname()


def test_a_host_that_sees_the_folder_answers(tmp_path: Path):
    token = write_folder_token(tmp_path)
    check_shared_folder_of_job(token.to_env())
    answer = check_shared_folder(token)
    assert answer.host == HOST
    assert abs(answer.skew_s) < 1
    assert describe_skew(token, answer) is None


def test_a_job_without_a_token_is_not_checked():
    assert FolderToken.from_env({}) is None
    check_shared_folder_of_job({})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda token: token.path.unlink(), "the folder is there, without that file"),
        (lambda token: token.path.write_text('{"secret": "other"}'), "another content"),
        (lambda token: token.path.write_text("{"), "the folder is there"),
    ],
    ids=["missing", "other", "torn"],
)
def test_a_host_with_another_folder_at_the_path_is_named(tmp_path: Path, change, found: str):
    token = write_folder_token(tmp_path)
    change(token)
    with pytest.raises(ConfigError, match=f"host {HOST} does not see the folder {tmp_path} of host {HOST}: .*{found}"):
        check_shared_folder(token, patience_s=0)


def test_a_host_without_the_folder_is_named(tmp_path: Path):
    token = replace(write_folder_token(tmp_path), folder="/nowhere", host="submitter")
    with pytest.raises(ConfigError, match=f"host {HOST} does not see the folder /nowhere of host submitter.*no such"):
        check_shared_folder(token, patience_s=0)


def test_a_token_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = write_folder_token(tmp_path)
    content = token.path.read_text()
    token.path.unlink()
    monkeypatch.setattr(shared_folder.time, "sleep", lambda seconds: token.path.write_text(content))
    assert check_shared_folder(token).host == HOST


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = write_folder_token(tmp_path)

    def refuse(path: Path, value: object) -> float:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shared_folder, "measure_clock_lead", refuse)
    with pytest.raises(ConfigError, match=f"{tmp_path} on host {HOST}: expected a folder .* Read-only"):
        check_shared_folder(token)
    with pytest.raises(ConfigError, match=f"{tmp_path} on host {HOST}: expected a folder .* Read-only"):
        write_folder_token(tmp_path)


@pytest.mark.parametrize(("ahead_s", "words"), [(20.0, "20 s behind that of"), (-20.0, "20 s ahead of that of")])
def test_clocks_that_differ_are_told_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s, words):
    token = replace(write_folder_token(tmp_path), ahead_s=ahead_s)
    answer = check_shared_folder(token)
    assert words in caplog.text
    assert words in str(describe_skew(token, answer))


@pytest.mark.parametrize(("ahead_s", "words"), [(90.0, "90 s behind that of"), (-90.0, "90 s ahead of that of")])
def test_clocks_that_differ_by_minutes_are_an_error_at_the_start(tmp_path: Path, ahead_s: float, words: str):
    token = replace(write_folder_token(tmp_path), ahead_s=ahead_s)
    with pytest.raises(ConfigError, match=f"clock of host {HOST} is {words} {HOST}.*Set the clocks by NTP"):
        check_shared_folder_of_job(token.to_env())


def test_a_slow_file_system_is_no_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [time.time()]
    monkeypatch.setattr(shared_folder.time, "time", lambda: now[0])
    monkeypatch.setattr(shared_folder, "fsync", lambda path: now.append(now.pop() + 100))
    assert abs(write_folder_token(tmp_path).ahead_s) < 1


def test_tokens_of_long_ago_are_removed(tmp_path: Path):
    old = write_folder_token(tmp_path)
    os.utime(old.path, (time.time() - 2 * shared_folder.KEPT_S,) * 2)
    assert write_folder_token(tmp_path).path.exists()
    assert not old.path.exists()
