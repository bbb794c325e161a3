"""The file of finished records: what a kill tore is cut off, what was damaged otherwise is left alone and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftworks.capture.partial import PartialFile
from draftworks.errors import StoreError


def test_a_file_begun_with_other_settings_is_refused(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    PartialFile(path, {"target": "a"}).__exit__(None, None, None)
    with pytest.raises(StoreError, match=r"answers.jsonl was begun with other settings"):
        PartialFile(path, {"target": "b"})


def test_partial_file_torn_anywhere_keeps_its_whole_records(tmp_path: Path):
    path = tmp_path / "partial.jsonl"
    with PartialFile(path, {"a": 1}) as partial:
        partial.extend([{"id": "x", "n": 1}, {"id": "y", "n": 2}])
    whole = path.read_bytes()
    starts = [whole.index(b'{"id": "x"'), whole.index(b'{"id": "y"'), len(whole)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with PartialFile(path, {"a": 1}) as partial:
            assert [name in partial for name in "xy"] == [length >= starts[1], length >= starts[2]]
            partial.extend([{"id": "z", "n": 3}])
            assert partial["z"]["n"] == 3
        assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "x", "n": 1', "not valid JSON"),
        ("\x00\x00", "not valid JSON"),
        ('["x", 1]', "expected a JSON object, found list"),
        ('{"n": 1}', "expected a record with a text `id`, found None"),
        ('{"id": 3}', "expected a record with a text `id`, found 3"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_whole_line_that_is_no_record_is_named_and_nothing_is_cut(tmp_path: Path, line: str, problem: str, last: bool):
    path = tmp_path / "answers.jsonl"
    with PartialFile(path, {"a": 1}) as partial:
        partial.extend([{"id": "x", "n": 1}])
    after = "" if last else '{"id": "y", "n": 2}\n'
    with path.open("a") as stream:
        stream.write(f"{line}\n{after}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"answers.jsonl, line 3: {problem}.*Remove that line"):
        PartialFile(path, {"a": 1})
    assert path.read_bytes() == before
