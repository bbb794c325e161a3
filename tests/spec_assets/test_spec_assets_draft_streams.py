"""Streams that are left of interrupted trainings go when one of their drafts is trained, together or alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftworks.storage.atomic import publish_json
from spec_assets.draft_streams import DRAFTS, StreamReader, remove_streams

TARGET: Any = SimpleNamespace(name="small", streaming=None)


def make_reader(name: str) -> StreamReader:
    return StreamReader(name, SimpleNamespace(), {"strategy": name})  # type: ignore[arg-type]


def test_streams_of_a_trained_draft_are_removed_and_no_others(tmp_path):
    workspace: Any = SimpleNamespace(var=tmp_path)
    eagle3, dflash, domino = map(make_reader, ("eagle3", "dflash", "domino"))
    folder = tmp_path / "streams" / "small"
    together = {"of both": (eagle3, dflash), "of others": (dflash, domino)}
    for name, readers in together.items():
        (folder / name).mkdir(parents=True)
        publish_json(folder / name / DRAFTS, {each.name: each.digest for each in readers})
    for each in (eagle3, dflash):
        (folder / each.digest).mkdir()
    (folder / "shared.lock").touch()
    remove_streams(workspace, TARGET, [eagle3])
    assert {path.name for path in folder.iterdir()} == {"of others", dflash.digest, "shared.lock"}
    remove_streams(workspace, TARGET, [])
    assert (folder / dflash.digest).exists()
