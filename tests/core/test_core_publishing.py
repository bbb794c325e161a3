"""A published file is complete or absent."""

from __future__ import annotations

import json

import pytest

from draftworks.publishing import publish_json, published


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
