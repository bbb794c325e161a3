"""The file of finished records: a torn last line is cut off; other damage is reported, and the file left unchanged."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from draftworks.capture.answers.record_file import RecordFile
from draftworks.errors import StoreError


def test_a_file_begun_with_other_settings_is_refused(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    RecordFile(path, {"target": "a"})
    with pytest.raises(StoreError, match=r"answers.jsonl was created with other settings"):
        RecordFile(path, {"target": "b"})


def test_partial_file_torn_anywhere_keeps_its_whole_records(tmp_path: Path):
    path = tmp_path / "partial.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}, {"id": "y", "n": 2}])
    whole = path.read_bytes()
    starts = [whole.index(b'{"id": "x"'), whole.index(b'{"id": "y"'), len(whole)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        partial = RecordFile(path, {"a": 1})
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
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    after = "" if last else '{"id": "y", "n": 2}\n'
    with path.open("a") as stream:
        stream.write(f"{line}\n{after}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"answers.jsonl, line 3: {problem}.*Remove that line"):
        RecordFile(path, {"a": 1})
    assert path.read_bytes() == before


def read_records(path: Path) -> dict[str, int]:
    partial = RecordFile(path, {"a": 1})
    return {name: partial[name]["n"] for name in "xyz" if name in partial}


def test_a_digit_that_was_changed_makes_its_record_absent_and_no_other(tmp_path: Path, caplog):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": name, "n": 1234} for name in "xyz"])
    whole = path.read_bytes()
    place = whole.index(b"1234", whole.index(b'"y"'))
    for at in range(place, place + 4):
        path.write_bytes(whole[:at] + b"7" + whole[at + 1 :])
        assert read_records(path) == {"x": 1234, "z": 1234}
    assert "answers.jsonl, line 3: the record does not match its checksum, and is generated again" in caplog.text
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "y", "n": 1234}])
    assert read_records(path) == dict.fromkeys("xyz", 1234)


def test_no_changed_byte_of_a_record_is_read_as_another_record(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    whole = path.read_bytes()
    start = whole.index(b'{"id"')
    for at in range(start, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with suppress(StoreError):  # a line that is no JSON any more
            assert read_records(path) == {}


def test_a_record_without_a_checksum_among_sealed_ones_counts_as_changed(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    with path.open("a") as stream:
        stream.write('{"id": "y", "n": 2}\n')
    assert read_records(path) == {"x": 1}


def test_records_from_before_there_were_checksums_are_kept_and_given_them(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "answers.jsonl"
    path.write_text('{"identity": {"a": 1}}\n{"id": "x", "n": 1}\n{"id": "y", "n": 2}\n{"id": "z", "n')
    assert read_records(path) == {"x": 1, "y": 2}
    assert "checksums were added to its 2 records" in caplog.text
    sealed = path.read_bytes()
    assert read_records(path) == {"x": 1, "y": 2}
    assert path.read_bytes() == sealed
    path.write_bytes(sealed.replace(b'"n": 2', b'"n": 3'))
    assert read_records(path) == {"x": 1}


def test_a_record_that_changes_while_it_is_in_use_is_not_given_out(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    path.write_bytes(path.read_bytes().replace(b'"n": 1', b'"n": 2'))
    with pytest.raises(StoreError, match="the record x was changed while it was in use"):
        partial["x"]


def write_record_file(path: Path, *records: dict) -> Path:
    partial = RecordFile(path, {"a": 1})
    partial.extend(records)
    return path


def test_records_of_another_file_are_taken_over_once_and_again_when_it_has_grown(tmp_path: Path):
    other = write_record_file(tmp_path / "other.jsonl", {"id": "x", "n": 1}, {"id": "y", "n": 1})
    before = other.read_bytes() + b'{"id": "torn'
    other.write_bytes(before)
    own = RecordFile(write_record_file(tmp_path / "own.jsonl", {"id": "x", "n": 2}), {"a": 1})
    assert [own.copy_records_from(other), own.copy_records_from(other)] == [1, 0]
    assert [own["x"]["n"], own["y"]["n"]] == [2, 1]
    assert other.read_bytes() == before
    write_record_file(other, {"id": "z", "n": 3})
    assert own.copy_records_from(other) == 1
    assert own["z"]["n"] == 3


def test_records_without_checksums_are_taken_over_from_a_file_of_before_there_were_any(tmp_path: Path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"identity": {"a": 1}}\n{"id": "x", "n": 1}\n')
    own = RecordFile(tmp_path / "own.jsonl", {"a": 1})
    assert own.copy_records_from(other) == 1
    assert own["x"] == {"id": "x", "n": 1}


def test_records_of_another_identity_are_not_taken_over(tmp_path: Path):
    other = tmp_path / "other.jsonl"
    RecordFile(other, {"a": 2})
    own = RecordFile(tmp_path / "own.jsonl", {"a": 1})
    with pytest.raises(StoreError, match=r"other.jsonl was created"):
        own.copy_records_from(other)
