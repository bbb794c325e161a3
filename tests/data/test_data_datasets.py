"""A data set as a whole: formats round trip, bad rows go to quarantine, too many of them stop the run.
Files of data sets elsewhere are downloaded once, identified by content, and pinned.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.urls import HubFiles, ObjectFiles, parse_dataset_url
from draftworks.data.datasets import detect_kind, load_conversations, load_tokens
from draftworks.data.sources import digest_dataset, fetch_objects, find_files, match_names
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import FileDigests
from draftworks.storage.object_store import ObjectStore

contents = st.text(min_size=1, max_size=12).filter(str.strip)
pairs = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD = {"messages": [{"role": "system", "content": "a"}]}


def dataset(*files: str, form: str = "auto") -> DatasetSpec:
    return DatasetSpec(name="toy", files=list(files), format=form)


def write_rows(path: Path, rows: list) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def as_row(pair_list: list[tuple[str, str]], form: str) -> dict:
    key, role, content = ("messages", "role", "content") if form == "openai" else ("conversations", "from", "value")
    names = ("user", "assistant") if form == "openai" else ("human", "gpt")
    return {key: [{role: name, content: text} for pair in pair_list for name, text in zip(names, pair)], "task": "t"}


@settings(max_examples=20)
@given(data=st.lists(pairs, min_size=1, max_size=5, unique_by=str))
def test_every_format_in_every_kind_of_file_gives_the_same_conversations(tmp_path_factory, data):
    found = []
    for form in ("openai", "sharegpt"):
        for suffix in ("jsonl", "json", "parquet"):
            folder = tmp_path_factory.mktemp("data")
            write_rows(folder / f"a.{suffix}", [as_row(pair_list, form) for pair_list in data])
            for spec in (dataset("a.*"), dataset("a.*", form=form)):
                assert detect_kind(spec, folder) == "conversations"
                found.append(load_conversations(spec, folder, folder / "out", 0.0))
    assert len({each.conversations for each in found}) == 1
    assert len(found[0].conversations) == len(data)
    assert all(each.columns == {"task": "t"} for each in found[0].conversations)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_pretokenized_rows_are_read_from_every_kind_of_file(tmp_path, suffix):
    write_rows(tmp_path / f"a.{suffix}", [{"input_ids": [1, 2, n], "loss_mask": [0, 1, 1]} for n in (3, 4, 3)])
    spec = dataset("a.*")
    assert detect_kind(spec, tmp_path) == "tokens"
    loaded = load_tokens(spec, tmp_path, tmp_path / "out", 0.0, vocab_size=10)
    assert [row.input_ids.tolist() for row in loaded.rows] == [[1, 2, 3], [1, 2, 4]]
    assert loaded.report.duplicates == 1


def test_rejected_rows_are_in_quarantine_with_file_line_and_reason_and_the_others_are_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), json.dumps(BAD), "nonsense", json.dumps(GOOD)]))
    loaded = load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 0.5)
    assert len(loaded.conversations) == 1
    assert loaded.report.counts() == {"files": 1, "rows": 4, "rejected": 2, "duplicates": 1}
    quarantined = [json.loads(line) for line in loaded.report.quarantine.read_text().splitlines()]
    assert [(each["file"], each["line"]) for each in quarantined] == [(str(path), 2), (str(path), 3)]
    assert quarantined[0]["reason"] == "no user turn to answer, and no assistant turn"
    assert quarantined[1]["reason"].startswith("invalid JSON")
    assert quarantined[1]["excerpt"] == "nonsense"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [json.dumps({**GOOD, "conversations": []}), "[1]"] * 2,
            "keys of several formats in one row: conversations, messages",
        ),
        (['{"prompt": "a"}'], "expected one of the keys conversations, messages, input_ids, found prompt"),
        (["nonsense", "nonsense"], r"Most often \(2 times\): invalid JSON"),
        ([""], "there is no row"),
    ],
)
def test_rows_that_show_no_format_are_an_error_with_the_commonest_reason(tmp_path, lines, reason):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=f"(no row can be read|there is no row)(.|\n)*{reason}" if "there" not in reason else reason
    ):
        detect_kind(dataset("a.jsonl"), tmp_path)


def test_what_rows_say_and_nobody_reads_is_counted(tmp_path):
    rows = [GOOD | {"notes": ["b"]}, GOOD | {"notes": ["d"], "more": {"e": 1}}, BAD | {"notes": ["f"]}]
    write_rows(tmp_path / "a.jsonl", rows)
    loaded = load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 1.0)
    assert loaded.report.counts()["unread_keys"] == {"more": 1, "notes": 2}


def test_too_many_rejected_rows_are_an_error_that_names_them_and_leaves_the_quarantine(tmp_path):
    write_rows(tmp_path / "a.jsonl", [GOOD, GOOD, BAD])
    with pytest.raises(DataError) as caught:
        load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 0.2)
    message = str(caught.value)
    quarantine = tmp_path / "out" / "quarantine.jsonl"
    assert (
        "1 of 3 rows rejected (33.3%), max_rejected_share allows 20.0%. Most often (1 times): no user turn" in message
    )
    assert f"{tmp_path / 'a.jsonl'}:3: no user turn to answer" in message
    assert str(quarantine) in message
    assert json.loads(quarantine.read_text())["line"] == 3
    assert list(quarantine.parent.iterdir()) == [quarantine]


def test_a_data_set_with_only_rejected_rows_is_an_error_whatever_the_limit(tmp_path):
    write_rows(tmp_path / "a.jsonl", [BAD])
    with pytest.raises(DataError, match=r"every one of its 1 rows was rejected(.|\n)*no user turn to answer"):
        load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 1.0)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", "[]")])
def test_empty_data_is_an_error(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="hold no row"):
        load_conversations(dataset(name), tmp_path, tmp_path / "out", 1.0)
    with pytest.raises(DataError, match="there is no row"):
        detect_kind(dataset(name), tmp_path)


def test_a_glob_without_files_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match="matches no file"):
        load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 1.0)
    assert not (tmp_path / "out").exists()


def test_kinds_are_not_mixed(tmp_path):
    write_rows(tmp_path / "a.jsonl", [GOOD, {"input_ids": [1], "loss_mask": [1]}])
    assert detect_kind(dataset("a.jsonl"), tmp_path) == "conversations"
    assert load_conversations(dataset("a.jsonl"), tmp_path, tmp_path / "out", 0.5).report.rejected == 1
    assert load_tokens(dataset("a.jsonl"), tmp_path, tmp_path / "out", 0.5, vocab_size=10).report.rejected == 1


@given(junk=st.lists(st.binary(max_size=40), max_size=8))
def test_junk_among_good_rows_loses_only_itself(tmp_path_factory, junk):
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps(GOOD).encode(), *(each.replace(b"\n", b"") for each in junk)]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    loaded = load_conversations(dataset("a.jsonl"), folder, folder / "out", 1.0)
    assert len(loaded.conversations) == 1
    assert loaded.report.rejected == loaded.report.rows - 1


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
