"""An append-only JSONL file of finished records, indexed by id.

A torn last line, left by a kill, is cut off. Any other line that is not a record is an error, and the file is not
changed. A record that was changed since it was written counts as absent, with a warning: making it again costs one
record, while an error would cost the run. Files written before checksums existed get them when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.storage.event_log import Line, append_lines, read_lines, write_lines
from draftworks.storage.files import parse_json, publish_json

_SEAL = b', "checksum": "%b"}'
_SEAL_LENGTH = len(_SEAL % (b"0" * 16))


def seal(record: Mapping[str, Any]) -> bytes:
    """Return the record's line: its JSON with, as the last field, the first 16 hex digits of that JSON's SHA-256."""
    body = json.dumps(record, ensure_ascii=True).encode()
    return body[:-1] + _SEAL % _checksum(body)


def is_intact(line: bytes) -> bool:
    """Return whether a line equals, byte for byte, a line that `seal` returned."""
    body = line[:-_SEAL_LENGTH] + b"}"
    return line == body[:-1] + _SEAL % _checksum(body)


def unseal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without its checksum."""
    return {key: value for key, value in record.items() if key != "checksum"}


def make_header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first record of a file in which every other record is sealed."""
    return {"identity": dict(identity), "sealed": True}


def is_sealed_file(first_line: bytes) -> bool:
    """Return whether a file with this first line has checksums; files of earlier versions have none."""
    try:
        return parse_json(first_line).get("sealed") is True
    except (ValueError, AttributeError):
        return False


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


log = logging.getLogger(__name__)


class RecordFile:
    """File of records {"id": ..., ...}, one per line. Only their byte offsets are kept in memory.

    Args:
        path: created if absent.
        identity: identity of the records; the first line holds it.
        confirm: called before records are written; an error of it leaves the file as it is.

    Raises:
        StoreError: the file was created with another identity, or one of its whole lines is not a record.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], confirm: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._confirm = confirm
        self._identity = dict(identity)
        self._offsets: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._add_missing_checksums(dict(identity))
        if not self._scan(dict(identity)):
            self._append([make_header(identity)])

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._offsets

    def __getitem__(self, record_id: str) -> dict[str, Any]:
        line = next(read_lines(self._path, self._offsets[record_id]), None)
        if line is None or not is_intact(line.content):
            raise StoreError(f"{self._path}: the record {record_id} was changed while it was in use. Run again")
        return unseal(json.loads(line.content))

    @property
    def ids(self) -> list[str]:
        """Ids of the intact records, in the order of the file."""
        return list(self._offsets)

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and flush them to disk (fsync) before returning."""
        records = list(records)
        starts = self._append(records)
        self._offsets.update({record["id"]: start for record, start in zip(records, starts, strict=True)})

    def copy_records_from(self, other: Path) -> int:
        """Append the records of another file of the same identity that are absent here, and return their number.

        `other` is not changed. Its size is noted in a file beside this one, so that it is not read again until it has
        grown.

        Raises:
            StoreError: `other` was created with another identity, or one of its whole lines is not a record.
        """
        sizes_file = self._path.with_suffix(".taken.json")
        size, known_sizes = other.stat().st_size, _read_noted_sizes(sizes_file)
        if known_sizes.get(str(other)) == size:
            return 0
        copied = {
            record["id"]: record for record in _read_intact_records(other, self._identity) if record["id"] not in self
        }
        self.extend(copied.values())
        publish_json(sizes_file, {**known_sizes, str(other): size})
        return len(copied)

    def _append(self, records: Iterable[Mapping[str, Any]]) -> list[int]:
        self._confirm()
        return append_lines(self._path, map(seal, records))

    def _scan(self, identity: dict[str, Any]) -> bool:
        """Index the intact records; return whether the file has its first line."""
        number = 0
        for number, line in enumerate(_read_lines(self._path), start=1):
            record = self._parse(line.content, number)
            if number == 1 and record.get("identity") != identity:
                raise StoreError(
                    f"{self._path} was created with other settings: expected {identity}, found "
                    f"{record.get('identity')}. Remove it, or write to another folder."
                )
            if number > 1 and is_intact(line.content):
                self._offsets[record["id"]] = line.start
            elif number > 1:
                log.warning(
                    "%s, line %d: the record does not match its checksum, and is generated again", self._path, number
                )
        return number > 0

    def _add_missing_checksums(self, identity: dict[str, Any]) -> None:
        """Add checksums to the records of a file without any. Raise StoreError if a whole line is not a record."""
        first = next(_read_lines(self._path), None)
        if first is None or is_sealed_file(first.content) or self._parse(first.content, 1).get("identity") != identity:
            return
        lines = _read_lines(self._path, len(first.content) + 1)
        records = [seal(self._parse(line.content, number)) for number, line in enumerate(lines, start=2)]
        write_lines(self._path, [seal(make_header(identity)), *records])
        log.info("%s: checksums were added to its %d records, which an earlier version wrote", self._path, len(records))

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        return _parse_record(line, self._path, number)


def read_record_ids(path: Path, identity: Mapping[str, Any]) -> set[str]:
    """Return the ids of the intact records of a file that another process may be writing; none without a file.

    Raises:
        StoreError: the file was created with another identity, or one of its whole lines is not a record.
    """
    return {record["id"] for record in _read_intact_records(path, identity)}


def _parse_record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return the record of a whole line, or raise StoreError if it is not a record.

    A kill leaves only a torn last line, so an invalid whole line is damage; cutting the file there could lose good
    records.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise _make_damage_error(path, number, f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise _make_damage_error(path, number, f"expected a JSON object, found {type(record).__name__}")
    if number > 1 and not isinstance(record.get("id"), str):
        raise _make_damage_error(path, number, f"expected a record with a text `id`, found {record.get('id')!r}")
    return record


def _make_damage_error(path: Path, number: int, problem: str) -> StoreError:
    return StoreError(
        f"{path}, line {number}: {problem}: the file is damaged, and was left unchanged. Remove that "
        "line (only its record is then generated again), or remove the file."
    )


def _read_intact_records(path: Path, identity: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the whole, unchanged records of a file that another run is writing, or that has no checksums yet."""
    has_checksums = True
    for number, line in enumerate(_read_lines(path), start=1):
        if number == 1:
            found = _parse_record(line.content, path, 1).get("identity")
            if found != identity:
                raise StoreError(f"{path} was created with other settings: expected {identity}, found {found}")
            has_checksums = is_sealed_file(line.content)
        elif is_intact(line.content) or not has_checksums:
            yield unseal(_parse_record(line.content, path, number))


def _read_lines(path: Path, cursor: int = 0) -> Iterator[Line]:
    """Yield the whole lines of a file; none without a file."""
    if path.exists():
        yield from read_lines(path, cursor)


def _read_noted_sizes(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
