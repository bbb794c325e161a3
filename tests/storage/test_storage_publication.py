"""Results are copied to object storage whole, once, and the pointer names the newest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftworks.errors import StoreError
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.object_store import ObjectStore, Publication


@pytest.fixture
def objects() -> ObjectStore:
    from obstore.store import MemoryStore

    return ObjectStore(MemoryStore(), "s3://toys/published", "published", retry_s=0)


def make_result(root: Path, content: str) -> Artifact:
    def build(out: Path) -> BuildResult:
        (out / "deep").mkdir(exist_ok=True)
        (out / "deep" / "weights").write_text(content)
        (out / "card.md").write_text("card")
        return BuildResult(f"version of {content}")

    return ArtifactStore(root).obtain("draft_export", "small", {"content": content}, build)


def names(objects: ObjectStore) -> list[str]:
    return [found.path for found in objects.list()]


def test_files_record_and_pointer_are_published(objects: ObjectStore, tmp_path: Path):
    made = make_result(tmp_path, "one")
    published = Publication(objects).publish(made)
    assert published.files == 2
    folder = published.url.removeprefix("s3://toys/published/")
    assert names(objects) == [
        f"{folder}/artifact.json",
        f"{folder}/card.md",
        f"{folder}/deep/weights",
        "draft_export/small/current.json",
    ]
    assert objects.read(f"{folder}/deep/weights").content == b"one"
    pointer = json.loads(objects.read("draft_export/small/current.json").content)
    assert f"draft_export/small/{pointer['folder']}" == folder
    assert pointer["data_version"] == made.data_version


def test_what_is_published_is_not_copied_again(objects: ObjectStore, tmp_path: Path):
    made = make_result(tmp_path, "one")
    first, before = Publication(objects).publish(made), names(objects)
    again = Publication(objects).publish(made)
    assert (again.url, again.files, names(objects)) == (first.url, 0, before)


def test_the_pointer_follows_the_newest_and_folders_stay(objects: ObjectStore, tmp_path: Path):
    publication = Publication(objects)
    one = publication.publish(make_result(tmp_path, "one"))
    two = publication.publish(make_result(tmp_path, "two"))
    pointer = json.loads(objects.read("draft_export/small/current.json").content)
    assert two.url.endswith(pointer["folder"])
    assert objects.read(f"{one.url.removeprefix('s3://toys/published/')}/deep/weights").content == b"one"


class Interrupted(ObjectStore):
    """Breaks off before its n-th change."""

    left = 0

    def inside(self, folder: str) -> ObjectStore:
        found = Interrupted(self._store, f"{self.url}/{folder}", f"{self._prefix}{folder}", 0)
        found.left = self.left
        return found

    def upload(self, path: str, file: Path) -> None:
        self._count()
        super().upload(path, file)

    def create(self, path: str, content: Any) -> bool:
        self._count()
        return super().create(path, content)

    def _count(self) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


@pytest.mark.parametrize("after", range(4))
def test_an_interrupted_publication_is_not_seen_and_goes_on(objects: ObjectStore, tmp_path: Path, after: int):
    made = make_result(tmp_path, "one")
    publication = Publication(objects)
    old = publication.publish(make_result(tmp_path / "other", "old"))
    broken = Interrupted(objects._store, objects.url, "published", 0)
    broken.left = after
    if after < 3:
        with pytest.raises(KeyboardInterrupt):
            Publication(broken).publish(made)
        pointer = json.loads(objects.read("draft_export/small/current.json").content)
        assert old.url.endswith(pointer["folder"])
    else:
        Publication(broken).publish(made)
    done = publication.publish(made)
    pointer = json.loads(objects.read("draft_export/small/current.json").content)
    assert done.url.endswith(pointer["folder"])
    assert objects.read(f"{done.url.removeprefix('s3://toys/published/')}/deep/weights").content == b"one"


class Contended(ObjectStore):
    """Another process swaps the pointer before every swap of this one, `others` times."""

    others = 3

    def inside(self, folder: str) -> ObjectStore:
        found = Contended(self._store, f"{self.url}/{folder}", f"{self._prefix}{folder}", 0)
        found.others = self.others
        return found

    def swap(self, path: str, content: bytes, seen: str | None) -> bool:
        if self.others:
            self.others -= 1
            newest = self.find(path)
            assert super().swap(path, b'{"folder": "other"}', None if newest is None else newest.version)
        return super().swap(path, content, seen)


def test_a_pointer_that_others_swap_is_read_again(objects: ObjectStore, tmp_path: Path):
    made = make_result(tmp_path, "one")
    published = Publication(Contended(objects._store, objects.url, "published", 0)).publish(made)
    pointer = json.loads(objects.read("draft_export/small/current.json").content)
    assert published.url.endswith(pointer["folder"])


def test_a_damaged_result_is_not_published(objects: ObjectStore, tmp_path: Path):
    made = make_result(tmp_path, "one")
    (made.path / "card.md").write_text("altered")
    with pytest.raises(StoreError, match="Materialize draft_export of target small again"):
        Publication(objects).publish(made)
    assert names(objects) == []
