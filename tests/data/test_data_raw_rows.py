"""Rows of files: what is written comes back, and what is broken is located.
Conversations sets come back as they were written, or not at all.
"""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import ROLES, Conversation, Turn, read_conversations, write_conversations
from draftworks.data.datasets import RawRow, Rejection, read_rows
from draftworks.data.sources import find_files
from draftworks.errors import DataError, StoreError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(values, max_size=8), st.sampled_from([None, 2]), st.booleans())
def test_a_json_list_comes_back_value_by_value_at_its_lines(tmp_path_factory, items, indent, bom):
    path = tmp_path_factory.mktemp("rows") / "a.json"
    path.write_text(json.dumps(items, indent=indent), encoding="utf-8-sig" if bom else "utf-8")
    rows = list(read_rows(path))
    assert [row.value for row in rows] == items
    if indent is None:
        assert {row.line for row in rows} <= {1}


@given(st.lists(values, max_size=8), st.sampled_from(["\n", "\r\n", "\n\n"]), st.sampled_from(["jsonl", "json"]))
def test_lines_come_back_value_by_value_at_their_lines(tmp_path_factory, items, end, suffix):
    items = [{"first": 1}, *items]
    path = tmp_path_factory.mktemp("rows") / f"a.{suffix}"
    path.write_text(end.join(json.dumps(item) for item in items), encoding="utf-8", newline="")
    step = end.count("\n")
    assert list(read_rows(path)) == [RawRow(str(path), 1 + step * n, item) for n, item in enumerate(items)]


@given(st.binary(max_size=300))
def test_binary_junk_is_rejected_row_by_row_or_as_a_file(tmp_path_factory, junk):
    folder = tmp_path_factory.mktemp("rows")
    for suffix in ("jsonl", "json", "parquet"):
        path = folder / f"a.{suffix}"
        path.write_bytes(junk)
        with contextlib.suppress(DataError):
            assert all(isinstance(row, (RawRow, Rejection)) for row in read_rows(path))


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "cp1252"])
def test_another_encoding_is_rejected_line_by_line(tmp_path, encoding):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "é"}\n{"a": "ü"}\n'.encode(encoding))
    rows = list(read_rows(path))
    assert all(isinstance(row, Rejection) for row in rows)
    assert rows[0].reason.startswith("not UTF-8")


def test_invalid_lines_are_located_and_the_others_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n\n{"b": 2}\n' + "[" * 100_000 + "\n", encoding="utf-8")
    first, bad, good, deep = read_rows(path)
    assert (first.value, good.value) == ({"a": 1}, {"b": 2})
    assert (bad.line, bad.excerpt, good.line, deep.line) == (2, '{"a":', 4, 5)
    assert bad.reason.startswith("invalid JSON")
    assert "nested too deeply" in deep.reason
    assert len(deep.excerpt) < 300


def test_a_huge_line_is_rejected_without_losing_the_next(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "' + "x" * 5000 + '"}\n{"b": 2}\n', encoding="utf-8")
    huge, good = read_rows(path, max_line_bytes=1000)
    assert huge.reason == "line longer than 1,000 bytes"
    assert (good.line, good.value) == (2, {"b": 2})


@pytest.mark.parametrize("text", ['[{"a": 1}, {"b"', '[{"a": 1}', '[{"a": 1} {"b": 2}]', "[1,]", "[1] 2", "[,1]"])
def test_an_incomplete_json_list_is_an_error_and_not_a_shorter_list(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.json: not a complete JSON list.*repair the file"):
        list(read_rows(path))


def test_parquet_rows_come_back_with_their_numbers(tmp_path):
    rows = [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = list(read_rows(tmp_path / "a.parquet"))
    assert [row.value for row in found] == rows
    assert [row.line for row in found] == list(range(1, 601))


def test_text_in_parquet_that_is_not_unicode_is_rejected_alone(tmp_path):
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    first, bad, last = read_rows(tmp_path / "a.parquet")
    assert (first.value, last.value) == ({"text": "good"}, {"text": "fine"})
    assert isinstance(bad, Rejection)
    assert bad.line == 2


def test_a_parquet_column_whose_name_is_not_unicode_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"human": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"human", b"\x80uman"))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_rows(path))


def test_a_truncated_parquet_file_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        list(read_rows(path))


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_globs_find_each_file_once_and_a_glob_without_files_is_an_error(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    assert [path.name for path in find_files(["*.jsonl", "b.jsonl"], tmp_path)] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"'\*\.parquet' matches no file below"):
        find_files(["*.jsonl", "*.parquet"], tmp_path)
    with pytest.raises(DataError, match=r"c\.txt: expected one of \.jsonl, \.json, \.parquet, found '\.txt'"):
        find_files(["c.*"], tmp_path)


NAMES = ["exp[1]", "a*b", "what?", "[", "]", "[!x]", "plain", "**"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_the_name_of_a_registry_is_a_pattern(tmp_path, name: str):
    for folder in (name, "exp1", "aXb", "whatX", "y"):
        (tmp_path / folder / "data").mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "data" / "x.jsonl").write_text("")
    assert find_files(["data/*.jsonl"], tmp_path / name) == [tmp_path / name / "data" / "x.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_what_exists_under_a_name_with_wildcards_is_meant_literally(tmp_path, name: str):
    for folder in (name, "exp1", "aXb", "whatX", "y", "plainer"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (name, "exp1", "aXb", "whatX", "z"):
            (tmp_path / folder / f"{file}.jsonl").write_text("")
    own = tmp_path / name
    assert find_files([f"{name}/{name}.jsonl"], tmp_path) == [own / f"{name}.jsonl"]
    assert find_files([f"{name}/*.jsonl"], tmp_path) == sorted(own.glob("*.jsonl"))
    assert find_files([str(own / f"{name}.jsonl")], tmp_path / "elsewhere") == [own / f"{name}.jsonl"]


def test_brackets_after_a_wildcard_are_those_of_a_name_where_they_match_nothing_else(tmp_path):
    for name in ("a[1].jsonl", "b1.jsonl"):
        (tmp_path / name).write_text("")
    assert [path.name for path in find_files(["*[1].jsonl"], tmp_path)] == ["b1.jsonl"]
    (tmp_path / "b1.jsonl").unlink()
    assert [path.name for path in find_files(["*[1].jsonl"], tmp_path)] == ["a[1].jsonl"]


turns = st.lists(
    st.builds(Turn, st.sampled_from(ROLES), st.text(max_size=20), st.just("") | st.text(max_size=5), st.booleans()),
    min_size=1,
    max_size=4,
)
columns = st.dictionaries(
    st.text(max_size=6),
    st.text(max_size=6) | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    max_size=3,
)


@given(st.lists(st.builds(Conversation.of, turns, columns), min_size=1, max_size=6, unique_by=lambda each: each.id))
def test_written_conversations_are_read_as_they_were(tmp_path_factory, conversations):
    folder = tmp_path_factory.mktemp("conversations")
    summary = write_conversations(folder, conversations, {"rows": 9})
    assert list(read_conversations(folder)) == conversations
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (summary["conversations"], summary["rows"]) == (len(conversations), 9)
    assert sorted(path.name for path in folder.iterdir()) == ["conversations.parquet", "summary.json"]


@given(turns, turns, columns)
def test_id_is_of_the_turns_alone(one, other, some):
    assert (Conversation.of(one).id == Conversation.of(other).id) == (one == other)
    assert Conversation.of(one, some).id == Conversation.of(one).id


def spoken(text: str, task: str = "qa") -> Conversation:
    return Conversation.of([Turn("user", text), Turn("assistant", "yes")], {"task": task})


def test_digest_of_a_set_follows_its_content_and_not_its_order(tmp_path):
    def written(name: str, *items: Conversation) -> str:
        return write_conversations(tmp_path / name, items)["digest"]

    original, regenerated = spoken("a"), Conversation(spoken("a").id, spoken("b").turns, {"task": "qa"})
    first = written("first", original, spoken("c"))
    assert first == written("order", spoken("c"), original)
    assert first != written("words under the same id", regenerated, spoken("c"))
    assert first != written("columns", spoken("a", "chat"), spoken("c"))


def test_nothing_to_write_or_one_id_twice_is_an_error_and_publishes_nothing(tmp_path):
    with pytest.raises(DataError, match="no conversation to write"):
        write_conversations(tmp_path, [])
    with pytest.raises(DataError, match=f"two conversations have the id {spoken('a').id}"):
        write_conversations(tmp_path, [spoken("a"), spoken("a", "other")])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rewrite_leaves_no_set_that_could_be_read(tmp_path):
    def broken():
        yield spoken("b")
        raise KeyboardInterrupt

    write_conversations(tmp_path, [spoken("a")])
    with pytest.raises(KeyboardInterrupt):
        write_conversations(tmp_path, broken())
    with pytest.raises(StoreError, match="never completed"):
        list(read_conversations(tmp_path))


@pytest.mark.parametrize("harm", ["missing", "truncated", "altered"])
def test_a_damaged_set_is_a_store_error_that_names_the_file(tmp_path, harm):
    write_conversations(tmp_path, [spoken("a")])
    path = tmp_path / "conversations.parquet"
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if harm == "truncated" else content.replace(b"yes", b"not"))
    with pytest.raises(StoreError, match=r"conversations\.parquet: (cannot be read|altered: expected digest)"):
        list(read_conversations(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 0}', '{"schema": 1}', "\xff"])
def test_a_damaged_summary_is_a_store_error(tmp_path, text):
    write_conversations(tmp_path, [spoken("a")])
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=r"summary\.json"):
        list(read_conversations(tmp_path))
