"""Files of data sets elsewhere are downloaded once, identified by content, and pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.urls import HubFiles, ObjectFiles, parse_dataset_url
from draftworks.data.sources import digest_dataset, fetch_objects, find_files, match_names
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import FileDigests
from draftworks.storage.object_store import ObjectStore

COMMIT = "0123456789abcdef" * 2 + "01234567"
HUB = f"hf://datasets/some/chats@{COMMIT}"


class Counted(ObjectStore):
    """Counts downloads."""

    downloads = 0

    def download(self, path: str, file: Path) -> None:
        self.downloads += 1
        super().download(path, file)


@pytest.fixture
def bucket() -> Counted:
    from obstore.store import MemoryStore

    objects = Counted(MemoryStore(), "s3://toys", retry_s=0)
    for name in ("chats/b.jsonl", "chats/a.jsonl", "chats/deep/c.jsonl", "chats/notes.txt", "other/d.jsonl"):
        objects.create(name, name.encode())
    return objects


def fetch(bucket: Counted, cache: Path, pattern: str) -> list[bytes]:
    files = fetch_objects(f"s3://toys/{pattern}", ObjectFiles("toys", pattern), bucket, cache)
    return [path.read_bytes() for path in files]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("chats/*.jsonl", ["chats/a.jsonl", "chats/b.jsonl"]),
        ("chats/**/*.jsonl", ["chats/a.jsonl", "chats/b.jsonl", "chats/deep/c.jsonl"]),
        ("**/[cd].jsonl", ["chats/deep/c.jsonl", "other/d.jsonl"]),
        ("chats/?.jsonl", ["chats/a.jsonl", "chats/b.jsonl"]),
        ("chats/[!a].jsonl", ["chats/b.jsonl"]),
        ("other/d.jsonl", ["other/d.jsonl"]),
    ],
)
def test_objects_that_a_pattern_matches_are_read_in_the_order_of_their_names(
    bucket: Counted, tmp_path: Path, pattern: str, names: list[str]
):
    assert fetch(bucket, tmp_path, pattern) == [name.encode() for name in names]


def test_a_dot_is_a_dot():
    assert match_names("a.jsonl", ["a.jsonl", "axjsonl"]) == ["a.jsonl"]


def test_an_object_is_downloaded_once_and_again_when_it_has_changed(bucket: Counted, tmp_path: Path):
    fetch(bucket, tmp_path, "chats/*.jsonl")
    fetch(bucket, tmp_path, "chats/*.jsonl")
    assert bucket.downloads == 2
    bucket.remove(["chats/a.jsonl"])
    bucket.create("chats/a.jsonl", b"changed")
    assert fetch(bucket, tmp_path, "chats/*.jsonl") == [b"changed", b"chats/b.jsonl"]
    assert bucket.downloads == 3


@pytest.mark.parametrize("pattern", ["chats/*.parquet", "chats/z.jsonl", "nothing/**"])
def test_a_pattern_that_matches_nothing_is_said(bucket: Counted, tmp_path: Path, pattern: str):
    with pytest.raises(DataError, match=r"s3://toys/.* matches no object"):
        fetch(bucket, tmp_path, pattern)


def test_urls_are_understood():
    assert parse_dataset_url("s3://bucket/a/*.jsonl") == ObjectFiles("bucket", "a/*.jsonl")
    assert parse_dataset_url(f"{HUB}/data/*.parquet") == HubFiles("some/chats", COMMIT, "data/*.parquet")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "hf://datasets/some/chats/data.jsonl",
            "expected a commit of 40 hex digits .* found none: what a branch names",
        ),
        ("hf://datasets/some/chats@main/data.jsonl", "expected a commit of 40 hex digits .* found main"),
        ("hf://some/chats/data.jsonl", "expected hf://datasets/org/name@commit/file"),
        ("https://host/data.jsonl", "expected a path, s3://bucket/… or hf://datasets/…, found https://"),
        ("s3://bucket", "expected the name of a file, or a pattern"),
        ("s3://key:hidden@bucket/data.jsonl", "must not contain keys"),
    ],
)
def test_a_url_that_cannot_be_read_or_is_not_pinned_is_refused_with_the_entry(url: str, message: str):
    with pytest.raises(ValueError, match=message):
        DatasetSpec(name="chats", files=[url])


def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "datasets--some--chats" / "snapshots" / COMMIT / "data"
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_pinned_file_in_the_hubs_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (offline_hub(tmp_path, monkeypatch) / "a.jsonl").write_text("{}")
    (tmp_path / "registry").mkdir()
    found = find_files([f"{HUB}/data/a.jsonl"], tmp_path / "registry")
    assert [path.name for path in found] == ["a.jsonl"]
    with pytest.raises(ConfigError, match=rf"{HUB}/data/b.jsonl: data/b.jsonl is not in the cache.*local copy"):
        find_files([f"{HUB}/data/b.jsonl"], tmp_path / "registry")


def test_the_files_of_a_commit_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = offline_hub(tmp_path, monkeypatch)
    for name in ("b.jsonl", "a.jsonl"):
        (folder / name).write_text(name)
    (tmp_path / "registry").mkdir()
    url = f"{HUB}/data/*.jsonl"
    with pytest.raises(ConfigError, match="the list of its files is not in the cache"):
        find_files([url], tmp_path / "registry")
    asked = []

    def list_files(self: object, dataset: str, **options: object) -> list[str]:
        asked.append((dataset, options["revision"]))
        return ["data/b.jsonl", "README.md", "data/a.jsonl"]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda dataset, name, **options: str(folder.parent / name))
    for _ in range(2):
        assert [path.name for path in find_files([url], tmp_path / "registry")] == ["a.jsonl", "b.jsonl"]
    assert asked == [("some/chats", COMMIT)]


def test_the_same_content_has_the_same_identity_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (offline_hub(tmp_path, monkeypatch) / "a.jsonl").write_text("{}")
    registry = tmp_path / "registry"
    registry.mkdir()
    (registry / "local.jsonl").write_text("{}")
    digests = FileDigests(tmp_path / "digests.json")
    here, there = (
        digest_dataset(DatasetSpec(name="chats", files=[each]), registry, digests)
        for each in ("local.jsonl", f"{HUB}/data/a.jsonl")
    )
    assert here == there
