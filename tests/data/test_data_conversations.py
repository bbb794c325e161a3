"""Conversations sets come back as they were written, or not at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import ROLES, Conversation, Turn, read_conversations, write_conversations
from draftworks.errors import DataError, StoreError

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
