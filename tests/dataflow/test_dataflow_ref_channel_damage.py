"""What a channel says of damage, other versions and places that cannot be written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from features_toys import toy_ref
from waiting import HANG_S

from draftworks.dataflow.channel_files import write_header
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_lines import RefCodec, SlimRefs, WholeRefs
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef


@pytest.fixture
def channel(tmp_path: Path) -> StreamingRefChannel:
    return StreamingRefChannel(tmp_path / "channel", idle_timeout_s=HANG_S)


def refs_of(*numbers: int) -> list[SampleRef]:
    return [toy_ref(number) for number in numbers]


def test_a_full_disk_is_one_error_and_the_next_writer_goes_on(channel, monkeypatch):
    write, left = os.write, 250

    def write_until_full(handle: int, content: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(handle, content[:left])
        left -= done
        return done

    writer = channel.open_writer()
    writer.publish(refs_of(1)[0])
    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(StoreError, match="the disk is full"):
        writer.publish_batch(refs_of(2, 3, 4))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="gave its side up: open a new one"):
        writer.publish_batch(refs_of(5))
    with channel.open_writer() as writer, channel.open_consumer() as reader:
        assert 1 <= writer.publish_batch(refs_of(1, 2, 3, 4)) <= 3
        assert reader.poll() == refs_of(1, 2, 3, 4)


def test_tensors_are_refused_and_nothing_is_written(channel):
    with channel.open_writer() as writer, channel.open_consumer() as reader:
        bad = replace(toy_ref(2), metadata={"hidden": torch.zeros(1)})
        with pytest.raises(TypeError, match="carries no tensors"):
            writer.publish_batch([toy_ref(1), bad])
        assert reader.poll() == []
        assert writer.publish_batch([toy_ref(1)]) == 1


WHOLE = [b"{}", b"[1]", b"\xff\xfe", b"{" * 500, b"", b"null", b'{"schema_version": 7}']
SLIM = [b"[1]", b'[1,"t",["k","k"],1,1]', b'["s","t",["k","k"],1,""]', b"\xff", b"[" * 5000, b"", b"null", b"{}\n[]"]


@pytest.mark.parametrize(
    ("codec", "line"),
    [
        pytest.param(codec, line, id=f"{type(codec).__name__}-{number}")
        for codec, lines in ((WholeRefs(), WHOLE), (SlimRefs(), SLIM))
        for number, line in enumerate(lines)
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, codec: RefCodec, line: bytes):
    channel = StreamingRefChannel(tmp_path, codec)
    with channel.open_writer() as writer:
        writer.publish(toy_ref(1))
    with (channel.folder / "refs.jsonl").open("ab") as stream:
        stream.write(line + b"\n")
    found = "refs.jsonl, line [234]: expected a reference"
    with channel.open_consumer() as reader, pytest.raises(StoreError, match=found):
        reader.poll()
    with pytest.raises(StoreError, match=found):
        channel.open_writer()


def test_a_sample_before_any_common_line_is_damage(channel):
    with channel.open_writer():
        (channel.folder / "refs.jsonl").write_text('["s","t",[],1,1]\n')
    with (
        channel.open_consumer() as reader,
        pytest.raises(StoreError, match="before the line with what samples have in"),
    ):
        reader.poll()


def test_a_shortened_file_is_noticed(channel):
    with channel.open_writer() as writer, channel.open_consumer() as reader:
        writer.publish_batch(refs_of(1, 2))
        assert len(reader.poll()) == 2
        os.truncate(channel.folder / "refs.jsonl", 5)
        with pytest.raises(StoreError, match="expected at least .* bytes, which were read before, found 5"):
            reader.poll()


def test_other_versions_and_forms_are_refused(channel):
    channel.folder.mkdir()
    write_header(channel.folder, "columns.9")
    for open_side in (channel.open_writer, lambda: channel.open_consumer().poll()):
        with pytest.raises(StoreError, match=r"with lines of form 'slim_ref.1', found .* and 'columns.9'"):
            open_side()
    (channel.folder / "channel.json").write_text(json.dumps({"schema": "draftworks.ref_channel.0"}))
    with pytest.raises(StoreError, match="Another version wrote this channel"):
        channel.open_writer()


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    channel = StreamingRefChannel(tmp_path / "file" / "channel")
    for open_side in (channel.open_writer, channel.open_consumer):
        with pytest.raises(StoreError, match="expected a folder that this user may write to"):
            open_side()
