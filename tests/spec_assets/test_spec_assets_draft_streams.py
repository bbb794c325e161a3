"""Streams that are left of interrupted trainings go when one of their drafts is trained, together or alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftworks.storage.files import publish_json
from resources.job_claims import CLAIM
from spec_assets import draft_streams
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


class Prepared(Exception):
    """Ends the opening of a stream once its folder is prepared."""


@pytest.mark.parametrize("claimed", [True, False], ids=["ended unheard", "of before"])
def test_figures_stay_of_producers_that_ended_while_no_run_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
):
    figures = tmp_path / "digest" / "producers" / "0.json"
    figures.parent.mkdir(parents=True)
    figures.write_text("{}")
    if claimed:
        (tmp_path / "digest" / f"produce.{CLAIM}").touch()

    def stop(*arguments: object) -> int:
        raise Prepared

    monkeypatch.setattr(draft_streams, "is_planned", lambda inputs: True)
    monkeypatch.setattr(draft_streams, "locate_streams", lambda workspace, target: tmp_path)
    monkeypatch.setattr(draft_streams, "count_stream_bytes", stop)
    reader: Any = SimpleNamespace(
        name="eagle3", digest="digest", inputs=None, to_follower=lambda: SimpleNamespace(streams=("last",))
    )
    target: Any = SimpleNamespace(capture=SimpleNamespace(budget_gb=1.0), streaming=None)
    nothing: Any = None
    with pytest.raises(Prepared), draft_streams.open_stream(nothing, nothing, target, [reader]):
        pass
    assert figures.exists() == claimed
