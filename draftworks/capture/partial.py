"""An append-only JSONL file of finished records, found again by id.

A torn last line, left by a kill, is cut off; any other line that is no record is an error, and the file is left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from draftworks.errors import StoreError


class PartialFile:
    """Records {"id": ..., ...}, one per line. Only their positions are kept in memory.

    Args:
        path: created if absent.
        identity: what the records were made with; its line comes first.

    Raises:
        StoreError: the file was begun with another identity, or a whole line of it is no record.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            end = self._scan(dict(identity))
        except StoreError:
            self._file.close()
            raise
        self._file.truncate(end)
        if end == 0:
            self._append([{"identity": dict(identity)}])

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._offsets

    def __getitem__(self, record_id: str) -> dict[str, Any]:
        self._file.seek(self._offsets[record_id])
        return json.loads(self._file.readline())

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; they are on disk when this returns."""
        records = list(records)
        starts = self._append(records)
        self._offsets.update({record["id"]: start for record, start in zip(records, starts, strict=True)})

    def _append(self, records: Iterable[Mapping[str, Any]]) -> list[int]:
        starts = []
        self._file.seek(0, os.SEEK_END)
        for record in records:
            starts.append(self._file.tell())
            self._file.write(json.dumps(record, ensure_ascii=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return starts

    def _scan(self, identity: dict[str, Any]) -> int:
        """Index what is there; the end of the last whole record."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            record = self._record(line, number)
            if end == 0 and record.get("identity") != identity:
                raise StoreError(
                    f"{self._path} was begun with other settings: expected {identity}, found {record.get('identity')}. "
                    "Remove it, or write to another folder."
                )
            if end:
                self._offsets[record["id"]] = end
            end += len(line)
        return end

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        """A whole line's record. Whatever else it holds was not left by a kill: cutting there could lose good records."""
        try:
            record = json.loads(line)
        except ValueError as error:
            raise self._damaged(number, f"not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise self._damaged(number, f"expected a JSON object, found {type(record).__name__}")
        if number > 1 and not isinstance(record.get("id"), str):
            raise self._damaged(number, f"expected a record with a text `id`, found {record.get('id')!r}")
        return record

    def _damaged(self, number: int, problem: str) -> StoreError:
        return StoreError(
            f"{self._path}, line {number}: {problem}: the file is damaged. Nothing was changed in it. Remove that line, "
            "and only its record is made again, or remove the file."
        )
