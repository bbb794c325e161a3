"""Files of lines, and the queue in front of them: nothing waits for a disk, and every loss is counted."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from recording_site import make_answer, recording_site, whole
from waiting import wait_until

from draftworks.recording.line_files import LineFiles
from draftworks.recording.line_writer import LineWriter


def read_all(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def test_a_file_that_is_full_is_followed_by_another(tmp_path: Path):
    files = LineFiles(tmp_path / "new", 10)
    for line in (b"1234\n", b"5678\n", b"longer than a file\n", b"9\n"):
        files.append(line)
    assert read_all(tmp_path / "new") == [b"1234\n5678\n", b"longer than a file\n", b"9\n"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_file_that_was_taken_away_is_followed_by_another(tmp_path: Path):
    files = LineFiles(tmp_path, 1000)
    files.append(b"1\n")
    next(tmp_path.iterdir()).unlink()
    files.append(b"2\n")
    assert read_all(tmp_path) == [b"2\n"]


def test_lines_that_a_full_disk_cut_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = LineFiles(tmp_path, 1000)
    files.append(b"whole\n")
    really, left = os.write, [3]

    def write(handle: int, content: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(handle, content[: left.pop()])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        files.append(b"cut off\n")
    monkeypatch.undo()
    files.append(b"later\n")
    assert read_all(tmp_path) == [b"whole\n", b"later\n"]


def test_a_disk_that_is_full_never_stops_answers_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = LineFiles(tmp_path, 1 << 20)
    problem = OSError(errno.ENOSPC, "No space left on device")

    async def test() -> None:
        async with recording_site(tmp_path, whole(make_answer()), files=files) as site:
            with monkeypatch.context() as patch:
                patch.setattr(files, "append", lambda lines: (_ for _ in ()).throw(problem))
                assert [await site.ask() for _ in range(3)] == [make_answer()] * 3
                await asyncio.to_thread(wait_until, lambda: site.writer.counts.no_disk == 3)
            assert await site.ask() == make_answer()
            assert len(await site.read_lines()) == 1
            assert site.writer.counts.written == 1
            [told] = site.told
            assert "lost" in told
            assert "No space left on device" in told

    asyncio.run(test())


def test_a_disk_that_hangs_never_delays_answers_and_costs_what_has_no_room(tmp_path: Path):
    goes_on = threading.Event()

    class HangingFiles(LineFiles):
        def append(self, lines: bytes) -> None:
            goes_on.wait()
            super().append(lines)

    async def test() -> None:
        async with recording_site(
            tmp_path, whole(make_answer()), files=HangingFiles(tmp_path, 1 << 20), max_items=4
        ) as site:
            assert [await site.ask() for _ in range(20)] == [make_answer()] * 20
            lost = site.writer.counts.no_room
            assert lost > 0
            goes_on.set()
            assert len(await site.read_lines()) == 20 - lost
            assert f"{lost} lost ({lost}: the queue was full)" in site.writer.counts.describe()

    asyncio.run(test())


def test_bytes_that_wait_are_bounded_too(tmp_path: Path):
    goes_on = threading.Event()
    told: list[str] = []

    def make_line(number: int) -> bytes:
        goes_on.wait()
        return f"{number}\n".encode()

    writer: LineWriter[int] = LineWriter(LineFiles(tmp_path, 1000), make_line, told.append, max_bytes=100)
    for number in range(5):
        writer.offer(number, 40)
    assert writer.counts.no_room == 3
    goes_on.set()
    writer.close(60)
    assert b"".join(read_all(tmp_path)) == b"0\n1\n"


def test_a_request_of_which_no_line_can_be_made_costs_no_other(tmp_path: Path):
    def make_line(number: int) -> bytes:
        return f"{1 // number}\n".encode()

    told: list[str] = []
    writer: LineWriter[int] = LineWriter(LineFiles(tmp_path, 1000), make_line, told.append)
    for number in (1, 0, 1):
        writer.offer(number, 1)
    writer.close(60)
    assert b"".join(read_all(tmp_path)) == b"1\n1\n"
    assert writer.counts.unreadable == 1
    assert "ZeroDivisionError" in told[0]
