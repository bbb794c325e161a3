"""A manifest finds any damage to a recorded file, names it, and says nothing of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.storage.artifacts import FileManifest, list_files

CONTENT = {"a.txt": b"first", "deep/er/b.txt": b"second\n" * 9, "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def of_length(path: Path) -> str:
    return str(path.stat().st_size)


@pytest.mark.parametrize("digest_of", [None, of_length])
def test_whole_files_are_as_recorded(folder: Path, digest_of: Callable[[Path], str] | None) -> None:
    manifest = FileManifest.record(folder, list_files(folder), **({"digest_of": digest_of} if digest_of else {}))
    assert {name: file.bytes for name, file in manifest.files.items()} == {n: len(c) for n, c in CONTENT.items()}
    assert manifest.find_damage(folder) is None
    manifest.require_intact(folder, "Never said")


def test_any_other_content_is_found_by_name(folder: Path) -> None:
    manifest, path = FileManifest.record(folder, list_files(folder)), folder / "deep/er/b.txt"
    whole = path.read_bytes()

    @given(
        content=st.binary(max_size=80) | st.integers(0, len(whole) - 1).map(lambda n: whole[:n] + b"?" + whole[n + 1 :])
    )
    def found(content: bytes) -> None:
        path.write_bytes(content)
        for kept in (manifest, FileManifest.of_digests(manifest.digests)):
            assert (kept.find_damage(folder) is None) == (content == whole)
            assert kept.find_damage(folder, ["a.txt", "empty"]) is None
            if content != whole:
                assert kept.find_damage(folder).startswith(f"{path}: ")
        assert (manifest.find_damage(folder, read=False) is None) == (len(content) == len(whole))

    found()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(b"fir"), "truncated or altered: expected 5 bytes, found 3 bytes"),
        (lambda path: path.write_bytes(b"First"), "altered: expected digest a7937b64b8caa58f, found "),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: expected a file, found a folder"),
    ],
)
def test_damage_says_what_was_expected_and_what_to_do(folder: Path, harm: Callable[[Path], object], said: str) -> None:
    manifest = FileManifest.record(folder, list_files(folder))
    harm(folder / "a.txt")
    with pytest.raises(StoreError, match=rf"^{folder / 'a.txt'}: {said}.*\. Make it again$"):
        manifest.require_intact(folder, "Make it again")
    assert (manifest.find_damage(folder, read=False) is None) == ("digest" in said)


def test_a_name_that_no_file_can_have_is_damage(folder: Path) -> None:
    assert "cannot be read: embedded null byte" in FileManifest.of_digests({"a\0b": "0" * 16}).find_damage(folder)


def test_what_is_no_file_is_not_recorded(folder: Path) -> None:
    with pytest.raises(OSError, match="expected a file, found a folder"):
        FileManifest.record(folder, ["deep"])
