"""What rows of each format become, and why others are rejected."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import ROLES, Turn
from draftworks.data.formats import OPENAI_ROLES, SHAREGPT_ROLES, RowError, parse_conversation, parse_tokens

contents = st.text(min_size=1, max_size=20).filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["conversations", "messages", "input_ids", "loss_mask", "from", "value", "role", "content", "x"])
hostile = st.recursive(
    json_values,
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=20,
)


@given(st.lists(st.tuples(st.sampled_from(sorted(SHAREGPT_ROLES)), contents), max_size=5), contents)
def test_sharegpt_and_openai_rows_of_one_conversation_have_one_id(turns, answer):
    turns = [*turns, ("gpt", answer)]
    sharegpt = parse_conversation({"conversations": [{"from": role, "value": text} for role, text in turns]})
    messages = [{"role": SHAREGPT_ROLES[role], "content": text} for role, text in turns]
    openai = parse_conversation({"messages": messages, "task": "chat"})
    assert sharegpt.turns == openai.turns == tuple(Turn(SHAREGPT_ROLES[role], text) for role, text in turns)
    assert sharegpt.id == openai.id
    assert (sharegpt.columns, openai.columns) == ({}, {"task": "chat"})


@given(hostile)
def test_any_json_value_is_a_conversation_or_a_reason(value):
    for parse in (parse_conversation, parse_tokens):
        with contextlib.suppress(RowError):
            parse(value)


def test_all_known_roles_map_to_ours():
    assert {*SHAREGPT_ROLES.values(), *OPENAI_ROLES.values()} == set(ROLES)


def said(*turns: tuple[object, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "expected an object, found list"),
        ({"text": "a"}, "expected one of the keys conversations, messages, input_ids, found text"),
        ({"messages": [], "input_ids": [1]}, "keys of several formats in one row: messages, input_ids"),
        ({"input_ids": [1], "loss_mask": [1]}, "a pre-tokenized row in a data set of conversations"),
        ({"messages": "hello"}, "messages: expected a list of messages, found str 'hello'"),
        ({"messages": []}, "no assistant turn"),
        (said(("user", "a")), "no assistant turn"),
        (said(("user", "a"), ("robot", "b")), "turn 2: unknown role 'robot': expected one of user, assistant"),
        (said((7, "a")), "turn 1: role: expected a role, found int 7"),
        ({"messages": ["a"]}, "turn 1: expected an object, found str 'a'"),
        (said(("user", " \n"), ("assistant", "b")), "turn 1: content: empty"),
        (said(("user", None), ("assistant", "b")), "turn 1: content: expected text, found nothing"),
        (said(("user", {"a": 1}), ("assistant", "b")), "turn 1: content: expected text, found dict"),
        (said(("user", "\ud800"), ("assistant", "b")), "turn 1: content: not Unicode text"),
        (said(("user", [{"type": "image_url"}])), "turn 1: content: expected parts of type text, found 'image_url'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls are not supported"),
        ({"conversations": [{"from": "gpt"}]}, "turn 1: value: expected text, found nothing"),
    ],
)
def test_a_bad_conversation_is_rejected_with_its_reason(row, reason):
    with pytest.raises(RowError) as caught:
        parse_conversation(row)
    assert reason in str(caught.value)


def test_a_row_of_another_format_than_configured_is_rejected():
    with pytest.raises(RowError, match="expected the key conversations, found messages"):
        parse_conversation(said(("assistant", "a")), expected="sharegpt")


def test_text_parts_are_joined_and_role_content_under_conversations_is_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_conversation(said(("assistant", parts))).turns == (Turn("assistant", "ab"),)
    mixed = {"conversations": [{"role": "assistant", "content": "ab"}]}
    assert parse_conversation(mixed).turns == (Turn("assistant", "ab"),)


def test_columns_are_the_short_finite_scalars():
    row = {**said(("assistant", "a")), "task": "qa", "n": 3, "ok": True, "score": 0.5}
    extra = {"nan": float("nan"), "long": "x" * 300, "nested": {"a": 1}, "none": None, "bad": "\ud800"}
    assert parse_conversation({**row, **extra}).columns == {"task": "qa", "n": 3, "ok": True, "score": 0.5}


@given(st.lists(st.tuples(st.integers(0, 2047), st.booleans()), min_size=1).filter(lambda x: any(b for _, b in x)))
def test_pretokenized_rows_keep_ids_and_mask(pairs):
    ids, mask = [i for i, _ in pairs], [b for _, b in pairs]
    row = parse_tokens({"input_ids": ids, "loss_mask": [int(b) for b in mask], "task": "qa"}, vocab_size=2048)
    assert (row.input_ids.tolist(), row.loss_mask.tolist()) == (ids, mask)
    assert (row.input_ids.dtype, row.loss_mask.dtype) == (np.int32, np.bool_)
    assert row.columns == {"task": "qa"}
    assert row.sample_id == parse_tokens({"input_ids": ids, "loss_mask": mask}).sample_id


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([1, 2], [1], "loss_mask has 1 entries, input_ids 2"),
        ([1, -2], [1, 1], "input_ids[1]: expected 0 to 9, found -2"),
        ([1, 10], [1, 1], "input_ids[1]: expected 0 to 9, found 10"),
        ([1, 2], [1, 2], "loss_mask[1]: expected 0 to 1, found 2"),
        ([1, 2], [0, 0], "no supervised token"),
        ([1, 2], None, "loss_mask: expected a list of integers, found nothing"),
        ([], [], "input_ids: empty"),
        ([1, True], [1, 1], "input_ids[1]: expected an integer, found bool"),
        ([1.0], [1], "input_ids[0]: expected an integer, found float"),
        ("12", [1], "input_ids: expected a list of integers, found str"),
    ],
)
def test_a_bad_pretokenized_row_is_rejected_with_its_reason(ids, mask, reason):
    with pytest.raises(RowError) as caught:
        parse_tokens({"input_ids": ids, "loss_mask": mask}, vocab_size=10)
    assert reason in str(caught.value)


def test_a_conversation_among_pretokenized_rows_is_rejected():
    with pytest.raises(RowError, match="a conversation in a data set of pre-tokenized rows"):
        parse_tokens(said(("assistant", "a")))
