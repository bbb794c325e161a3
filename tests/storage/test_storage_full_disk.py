"""A full disk is told as such whichever library met it; nothing else is."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftworks.storage.files import explain_full_disk


def write_with_python(path: str) -> None:
    with open(path, "wb") as stream:
        stream.write(b"x")


def write_with_arrow(path: str) -> None:
    """To an open sink: with a path it would remove what it could not write, here a device of the machine."""
    with pa.OSFile(path, "wb") as sink:
        pq.write_table(pa.table({"a": list(range(100_000))}), sink)


def raise_of_safetensors(path: str) -> None:
    """What it says of a full disk; it cannot be made to write to the device that always is."""
    from safetensors import SafetensorError

    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("write", [write_with_python, write_with_arrow, raise_of_safetensors])
def test_every_librarys_full_disk_is_told(write, tmp_path: Path):
    def save() -> None:
        try:
            write("/dev/full")
        except Exception as error:
            raise RuntimeError("while something was saved") from error

    with pytest.raises(RuntimeError) as caught:
        save()
    told = explain_full_disk(caught.value, tmp_path)
    assert told is not None
    assert "the disk is full" in str(told)
    assert "Make room and run it again" in str(told)


def test_other_errors_are_not_full_disks(tmp_path: Path):
    for error in (ValueError("x"), OSError(errno.EACCES, "no"), FileNotFoundError("x"), MemoryError()):
        assert explain_full_disk(error, tmp_path) is None


def test_the_file_is_named_and_else_the_folder(tmp_path: Path):
    assert str(explain_full_disk(OSError(errno.ENOSPC, "no", "/x/file"), tmp_path)).startswith(
        "/x/file: the disk is full"
    )
    assert f"are free in {tmp_path})" in str(explain_full_disk(OSError(errno.ENOSPC, "no"), tmp_path / "not yet"))
