"""A published file is complete or absent."""

from __future__ import annotations

import json

import pytest

from draftworks.storage.atomic import publish_json, published, published_folder


def test_an_interrupted_write_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "a.json"
    publish_json(path, {"a": "é"})

    def interrupted() -> None:
        with published(path) as staging:
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
    with published_folder(path) as staging:
        (staging / "a").write_text("whole")

    def interrupted() -> None:
        with published_folder(path) as staging:
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
        with published_folder(path) as staging:
            (staging / name).touch()
    assert [found.name for found in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]
