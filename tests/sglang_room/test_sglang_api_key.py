"""A key reaches the server's arguments, and neither its command line nor its log."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftworks.sglang import child_lifetime
from draftworks.sglang.api_key import (
    HIDDEN,
    VARIABLE,
    build_headers,
    hide_in_log_records,
    make_key_file,
    read_key,
    take_key_arguments,
)


@pytest.fixture
def _same_records() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def test_a_key_is_new_and_its_file_is_its_owners_from_the_first_moment(tmp_path: Path):
    for name in ("a", "b"):
        make_key_file(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    keys = {read_key(tmp_path / name) for name in ("a", "b")}
    assert len(keys) == 2
    assert all(len(key) >= 32 and key.isascii() and not key.isspace() for key in keys)
    with pytest.raises(FileExistsError):
        make_key_file(tmp_path / "a")
    assert build_headers(None) == {}


def test_a_server_without_a_key_has_no_more_arguments():
    assert take_key_arguments({}) == []


@pytest.mark.usefixtures("_same_records")
def test_log_records_do_not_have_the_key(caplog):
    hide_in_log_records("secret/key")
    with caplog.at_level(logging.INFO):
        logging.getLogger("any").info("args=%s of %s", {"api_key": "secret/key"}, "secret/key")
        logging.getLogger("any").info("all %d%%", 5)
    assert caplog.messages == [f"args={{'api_key': '{HIDDEN}'}} of {HIDDEN}", "all 5%"]


PROGRAM = """
import argparse, logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, force=True, stream=sys.stdout, format="%(message)s")
key = Path(os.environ["KEY"]).read_text()
parser = argparse.ArgumentParser()
parser.add_argument("word")
parser.add_argument("--api-key")
assert vars(parser.parse_args()) == {"word": "one", "api_key": key}, sys.argv
assert key.encode() not in Path("/proc/self/cmdline").read_bytes()
assert "DRAFTWORKS_SGLANG_KEY_FILE" not in os.environ
logging.getLogger("server").info(f"server_args={sys.argv}")
"""


def test_a_program_has_the_key_in_its_arguments_alone(tmp_path: Path, monkeypatch):
    make_key_file(tmp_path / "key")
    (tmp_path / "key").write_text("-" + read_key(tmp_path / "key"))  # as one of 64 begins
    for name in (VARIABLE, "KEY"):
        monkeypatch.setenv(name, str(tmp_path / "key"))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, *child_lifetime.build_command(tmp_path, "program"), "one"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"'--api-key={HIDDEN}'" in done.stdout
    assert read_key(tmp_path / "key") not in done.stdout + done.stderr
