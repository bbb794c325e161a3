"""The spool: the reader gets what the engine wrote, complete or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from waiting import HANG_S

from draftworks.errors import EngineError, PassingTroubleError, UnsoundEngineError
from draftworks.handover.background import BackgroundHandOver
from draftworks.handover.spool import (
    AnsweredRequest,
    Part,
    SpoolSink,
    SpoolSource,
    is_captured,
    make_request_id,
    sweep,
    take_parts,
    wants_logits,
    write_failure,
    write_part,
)


def random_part(start: int = 0, dtype: torch.dtype = torch.float32) -> Part:
    generator = torch.Generator().manual_seed(start)
    taps, last = torch.randn(3, 5, 4, generator=generator).to(dtype), torch.randn(5, 4, generator=generator).to(dtype)
    return Part(start, torch.arange(5), taps, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_taken_as_written_and_only_once(tmp_path: Path, dtype):
    request_id, written = make_request_id(), random_part(dtype=dtype)
    write_part(tmp_path, request_id, written)
    (taken,) = take_parts(tmp_path, request_id)
    assert taken.start == 0
    for name in ("input_ids", "taps", "last"):
        assert torch.equal(getattr(taken, name), getattr(written, name))
    assert taken.logits is None
    assert list(tmp_path.iterdir()) == []
    assert take_parts(tmp_path, request_id) == []


def test_slices_of_a_packed_batch_take_no_more_room_than_their_rows(tmp_path: Path):
    packed = torch.zeros(8, 10_000, 8)
    write_part(tmp_path, "draftworks-a", Part(0, torch.arange(2), packed[:, 7:9], packed[0, 7:9]))
    assert next(tmp_path.iterdir()).stat().st_size < 2000


def test_parts_come_in_the_order_of_their_tokens(tmp_path: Path):
    request_id = make_request_id()
    for start in (16, 0, 8):
        write_part(tmp_path, request_id, random_part(start))
    assert [part.start for part in take_parts(tmp_path, request_id)] == [0, 8, 16]


def test_a_reader_on_another_host_changes_the_folder_before_it_lists_it_and_leaves_nothing(tmp_path: Path):
    """A client of a network file system lists a folder anew after it has changed it."""
    source, request_id = SpoolSource(tmp_path / "spool", remote=True), make_request_id()
    source.discard([request_id])  # of a server that is being started again
    (tmp_path / "spool").mkdir()
    os.utime(tmp_path / "spool", ns=(0, 0))
    source.discard([request_id])
    assert (tmp_path / "spool").stat().st_mtime_ns > 0
    part = random_part()
    write_part(tmp_path / "spool", request_id, part)
    ((found,),) = source.take([AnsweredRequest(request_id)], 5)
    assert torch.equal(found.last, part.last)
    assert not list((tmp_path / "spool").iterdir())


def test_requests_do_not_see_each_other(tmp_path: Path):
    ours, theirs = make_request_id(), make_request_id()
    write_part(tmp_path, theirs, random_part())
    assert take_parts(tmp_path, ours) == []
    SpoolSource(tmp_path).discard([ours])
    assert len(take_parts(tmp_path, theirs)) == 1


def test_a_write_that_breaks_off_leaves_nothing_to_take(tmp_path: Path, monkeypatch):
    def break_off(tensors: dict, path: Path, metadata: dict) -> None:
        path.write_bytes(b"half a header")
        raise OSError("no space left")

    monkeypatch.setattr("draftworks.handover.spool.save_file", break_off)
    request_id = make_request_id()
    with pytest.raises(OSError, match="no space left"):
        write_part(tmp_path, request_id, random_part())
    write_failure(tmp_path, request_id, "no space left")
    with pytest.raises(PassingTroubleError, match="no space left"):
        take_parts(tmp_path, request_id)
    assert list(tmp_path.iterdir()) == []


def test_the_reason_of_a_failure_is_told(tmp_path: Path):
    write_failure(tmp_path, "draftworks-a", "no space left")
    with pytest.raises(PassingTroubleError, match="could not write hidden states: no space left"):
        take_parts(tmp_path, "draftworks-a")
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_and_those_of_another_version_are_refused(tmp_path: Path):
    (tmp_path / "draftworks-a.0.safetensors").write_bytes(b"half a header")
    with pytest.raises(PassingTroubleError, match=r"draftworks-a.0.safetensors is not a readable"):
        take_parts(tmp_path, "draftworks-a")
    save_file({"last": torch.zeros(1)}, tmp_path / "draftworks-b.0.safetensors", {"schema": "draftworks.spool.0"})
    with pytest.raises(UnsoundEngineError, match=r"schema 'draftworks.spool.0', expected 'draftworks.spool.2'"):
        take_parts(tmp_path, "draftworks-b")


def test_only_our_requests_are_captured_and_only_some_with_logits():
    assert is_captured(make_request_id())
    assert not wants_logits(make_request_id())
    assert wants_logits(make_request_id(with_logits=True))
    assert not is_captured("HEALTH_CHECK_1")


def test_a_sweep_takes_old_files_of_our_requests_and_nothing_else(tmp_path: Path):
    old, old_failed, fresh = make_request_id(with_logits=True), make_request_id(), make_request_id()
    write_part(tmp_path, old, random_part())
    (tmp_path / f"{old}.8.writing").write_bytes(b"half a header")
    write_failure(tmp_path, old_failed, "no space left")
    others = {"other.0.safetensors", "draftworks-1.0.tar.gz"}
    for name in others:
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        os.utime(path, times=(1e9, 1e9))
    write_part(tmp_path, fresh, random_part())
    sweep(tmp_path, older_than_s=3600)
    assert {path.name for path in tmp_path.iterdir()} == others | {f"{fresh}.0.safetensors"}


def test_a_spool_that_is_not_there_has_nothing_to_sweep(tmp_path: Path):
    sweep(tmp_path / "nowhere", older_than_s=0)


def test_a_reader_waits_for_what_was_announced_and_for_nothing_else(tmp_path: Path):
    sink, late, never = SpoolSink(tmp_path), make_request_id(), make_request_id()
    sink.announce(late, 0)
    writing = threading.Timer(0.2, sink.write, (late, random_part()))
    writing.start()
    parts = SpoolSource(tmp_path).take([AnsweredRequest(never), AnsweredRequest(late)], timeout_s=HANG_S)
    assert [len(each) for each in parts] == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_come_is_told_in_time_and_what_ended_the_engine_at_once(tmp_path: Path):
    def look() -> None:
        raise EngineError("the engine has ended")

    for timeout_s, error, message in ((0.1, PassingTroubleError, "not come for 0.1 s"), (60, EngineError, "has ended")):
        request_id = make_request_id()
        SpoolSink(tmp_path).announce(request_id, 0)
        with pytest.raises(error, match=message):
            SpoolSource(tmp_path).take([AnsweredRequest(request_id)], timeout_s, look)
        assert list(tmp_path.iterdir()) == []


def test_what_is_written_after_its_reader_gave_up_is_not_left_behind(tmp_path: Path):
    sink, request_id = SpoolSink(tmp_path), make_request_id()
    sink.announce(request_id, 0)
    SpoolSource(tmp_path).discard([request_id])
    sink.write(request_id, random_part())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [0, 100_000])
def test_the_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int):
    """Room for the part alone is not enough: a twentieth of the disk stays free."""
    hand_over = BackgroundHandOver(SpoolSink(tmp_path))
    disk = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=2_000_000)
    monkeypatch.setattr("draftworks.handover.spool.os.statvfs", lambda path: disk)
    old, request_id = make_request_id(), make_request_id()
    (tmp_path / f"{old}.0.safetensors").touch()
    os.utime(tmp_path / f"{old}.0.safetensors", times=(1e9, 1e9))
    hand_over.put(request_id, random_part())
    with pytest.raises(
        PassingTroubleError, match=r"spool .* has room for 0 MiB .*Lower capture.in_flight_mb"
    ) as raised:
        take_parts(tmp_path, request_id)
    assert "Traceback" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
