"""Whatever lies where a file is expected is told within a moment, and so is JSON that would break its reader."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.storage.files import (
    MAX_JSON_DEPTH,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    require_file,
)
from draftworks.storage.identity import canonical_json, file_digest


@pytest.fixture(params=["pipe", "socket", "folder", "device", "missing", "dangling", "loop"])
def no_file(request, tmp_path: Path) -> Path:
    path = tmp_path / "x"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()  # what was bound stays in the folder
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "dangling":
        path.symlink_to(tmp_path / "nothing")
    elif request.param == "loop":
        path.symlink_to(path)
    return path


@pytest.mark.parametrize("read", [open_regular, require_file, read_json, file_digest])
def test_what_is_no_file_is_an_os_error_at_once(read, no_file):
    with pytest.raises(OSError, match="x"):
        read(no_file)


def test_a_file_larger_than_asked_for_is_not_read(tmp_path: Path):
    path = tmp_path / "x"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than 1,000 bytes"):
        read_bytes(path, 1000)


def test_a_file_whose_size_is_not_known_is_read_whole():
    path = Path("/proc/filesystems")
    assert path.stat().st_size == 0
    assert read_bytes(path, 1_000_000) == path.read_bytes() != b""


@pytest.mark.parametrize(
    "nested", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "[" * 101 + "]" * 101]
)
def test_deep_json_is_a_value_error(nested: str):
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|delimiter"):
        parse_json(nested)


def test_json_up_to_the_limit_is_read_and_written_again():
    text = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert canonical_json(parse_json(text)) == text
    wide = json.dumps([{"a": [1]}] * 1000)
    assert parse_json(wide) == json.loads(wide)


@given(st.one_of(st.binary(max_size=60), st.text('[]{}",:0123456789eE-+.ntfa \\u\ud800', max_size=60).map(str)))
def test_any_text_is_a_value_or_a_value_error(text: bytes | str):
    try:
        value = parse_json(text)
    except ValueError:
        return
    assert value == json.loads(text) or value != value or "NaN" in str(text)
