"""A published file is complete or absent."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from kill_points import killed_before

from draftworks.storage.files import publish_file, publish_folder, publish_json, remove, replace_folder


def test_an_interrupted_write_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "a.json"
    publish_json(path, {"a": "é"})

    def interrupted() -> None:
        with publish_file(path) as staging:
            staging.write_text("half")
            assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    assert list(path.parent.iterdir()) == [path]


def test_a_published_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "a.json"
    for value in (1, 2):
        publish_json(path, value)
    assert json.loads(path.read_text()) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_folder_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "folder"
    with publish_folder(path) as staging:
        (staging / "a").write_text("whole")

    def interrupted() -> None:
        with publish_folder(path) as staging:
            (staging / "a").write_text("half")
            assert (path / "a").read_text() == "whole"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path / "a").read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_published_folder_takes_the_place_of_the_old_one_and_of_what_a_dead_writer_left(tmp_path):
    path = tmp_path / "folder"
    for name in ("old", "new"):
        (tmp_path / ".folder.staging").mkdir()
        (tmp_path / ".folder.staging" / "half").touch()
        with publish_folder(path) as staging:
            (staging / name).touch()
    assert [found.name for found in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def write(folder: Path, generation: int) -> None:
    """A folder whose files all tell its generation."""
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(str(generation))


def generation_in(folder: Path) -> int:
    (generation,) = {int((folder / name).read_text()) for name in ("a", "b")}
    return generation


def publishing(path: Path, generation: int) -> None:
    with publish_folder(path) as staging:
        staging.rmdir()
        write(staging, generation)


def replacing(path: Path, generation: int) -> None:
    staging = path.with_name("folder.partial")
    remove(staging)
    write(staging, generation)
    replace_folder(staging, path, path.with_name("folder.old"))


@pytest.mark.parametrize("work", [publishing, replacing])
@pytest.mark.parametrize("there", [False, True])
def test_a_kill_before_any_change_of_the_file_system_leaves_the_old_folder_the_new_one_or_none(
    tmp_path: Path, work: Callable[[Path, int], None], there: bool
) -> None:
    seen = set()
    for event in count():
        path = tmp_path / str(event) / "folder"
        path.parent.mkdir()
        if there:
            write(path, 1)
        killed = killed_before(event, partial(work, path, 2))
        seen.add(generation_in(path) if path.exists() else None)
        assert killed or generation_in(path) == 2
        work(path, 3)
        assert generation_in(path) == 3
        assert list(path.parent.iterdir()) == [path]
        if not killed:
            break
    assert event >= 5
    assert seen == ({None, 1, 2} if there else {None, 2})


def test_a_rename_that_is_refused_leaves_the_old_folder_and_the_new_one_where_they_were(tmp_path, monkeypatch) -> None:
    path, staging, aside = (tmp_path / name for name in ("folder", "staging", "aside"))
    write(path, 1)
    write(staging, 2)
    rename = os.replace

    def refusing(source: Path, destination: Path) -> None:
        if source == staging:
            raise OSError(errno.EIO, "the disk refuses")
        rename(source, destination)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(OSError, match="the disk refuses"):
        replace_folder(staging, path, aside)
    assert (generation_in(path), generation_in(staging)) == (1, 2)
    assert not aside.exists()


def test_a_folder_that_somebody_else_published_is_left_alone(tmp_path: Path) -> None:
    path, staging = tmp_path / "folder", tmp_path / "staging"
    write(path, 1)
    write(staging, 2)
    with pytest.raises(OSError, match="not empty"):
        replace_folder(staging, path, None)
    assert (generation_in(path), generation_in(staging)) == (1, 2)
