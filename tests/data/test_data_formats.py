"""What rows of each format become, and why others are rejected."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import ANSWER, ROLES, Turn
from draftworks.data.formats import (
    OPENAI_ROLES,
    SHAREGPT_ROLES,
    RowError,
    find_unread_keys,
    parse_conversation,
    parse_tokens,
)

contents = st.text(min_size=1, max_size=20).filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["conversations", "messages", "input_ids", "loss_mask", "from", "value", "role", "content", "x"])
SPOKEN = sorted(name for name, role in SHAREGPT_ROLES.items() if role != "tool")
hostile = st.recursive(
    json_values,
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=20,
)


@given(st.lists(st.tuples(st.sampled_from(SPOKEN), contents), max_size=5), contents)
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


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


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
        ({"messages": []}, "no user turn to answer, and no assistant turn"),
        (said(("system", "a")), "no user turn to answer, and no assistant turn"),
        (said(("user", "a"), ("robot", "b")), "turn 2: unknown role 'robot': expected one of user, assistant"),
        (said((7, "a")), "turn 1: role: expected a role, found int 7"),
        ({"messages": ["a"]}, "turn 1: expected an object, found str 'a'"),
        (said(("user", " \n"), ("assistant", "b")), "turn 1: content: empty"),
        (said(("user", None), ("assistant", "b")), "turn 1: content: expected text, found nothing"),
        (said(("user", {"a": 1}), ("assistant", "b")), "turn 1: content: expected text, found dict"),
        (said(("user", "\ud800"), ("assistant", "b")), "turn 1: content: not Unicode text"),
        (said(("user", [{"type": "image_url"}])), "turn 1: content: expected parts of type text, found 'image_url'"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "turn 1: tool_calls: conversations with",
        ),
        (
            {**said(("user", "a")), "tools": [{"type": "function"}]},
            "tools: conversations with tools are not supported yet",
        ),
        (said(("user", "a"), ("function", "b")), "turn 2: role function: conversations with tools"),
        (said(("user", "a"), ("ipython", "b")), "turn 2: role ipython: conversations with tools"),
        ({**said(("user", "a")), "images": ["a.png"]}, "images: conversations with pictures, sound or films"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, "turn 1: audio: conversations with"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, "every assistant turn is excluded from training (weight, train"),
        (
            {"messages": [ASKED, {**SAID, "weight": 0.5}]},
            "turn 2: weight: expected 0 or 1, or false or true, found float 0.5",
        ),
        (
            {"messages": [{**ASKED, "reasoning": "a"}, SAID]},
            "turn 1: reasoning of a user turn: only assistant turns think",
        ),
        (
            {"messages": [ASKED, {**SAID, "reasoning": "a", "thinking": "b"}]},
            "turn 2: reasoning_content, reasoning, thinking: s",
        ),
        ({"messages": [ASKED, {**SAID, "reasoning_content": 3}]}, "turn 2: reasoning: expected text, found int 3"),
        (
            {"conversations": [{"from": "observation", "value": "b"}]},
            "turn 1: role observation: conversations with tools",
        ),
        ({**said(("system", "a"), ("user", "b")), "system": "c"}, "system: the row has a system turn too"),
        ({**said(("user", "b")), "system": 3}, "system: expected text, found int 3"),
        ({"conversations": [{"from": "gpt"}]}, "turn 1: value: expected text, found nothing"),
    ],
)
def test_a_bad_conversation_is_rejected_with_its_reason(row, reason):
    with pytest.raises(RowError) as caught:
        parse_conversation(row)
    assert reason in str(caught.value)


@pytest.mark.parametrize("turns", [[("user", "a")], [("user", "a"), ("assistant", "b"), ("user", "c")]])
def test_a_last_question_is_for_the_target_to_answer(turns):
    found = parse_conversation(said(*turns))
    assert found.turns == (*(Turn(role, text) for role, text in turns), ANSWER)
    assert found.awaits_answer
    assert not parse_conversation(said(("user", "a"), ("assistant", "b"))).awaits_answer


@pytest.mark.parametrize("words", ["You are brief.", "You are a calculator. " * 50])
def test_a_rows_system_prompt_is_its_first_turn(words):
    found = parse_conversation({**said(("user", "a"), ("assistant", "b")), "system": words})
    assert found.turns[0] == Turn("system", words)
    assert found.columns == {}
    assert parse_conversation({**said(("user", "a")), "system": " "}).turns[0].role == "user"


def test_no_tools_are_no_reason_to_refuse_a_row():
    row = said(("user", "a"), ("assistant", "b"))
    assert parse_conversation({**row, "tools": [], "functions": None}).id == parse_conversation(row).id


def test_a_row_of_another_format_than_configured_is_rejected():
    with pytest.raises(RowError, match="expected format sharegpt \(key conversations\), found openai"):
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_padding_of_pretokenized_rows_is_no_token(ids, before, after):
    """Left padding would be read as words, and would be the prompt by which rows are held out."""
    row = {"input_ids": ids, "loss_mask": [1] * len(ids)}
    pads = {name: [0] * before + row[name] + [0] * after for name in row}
    attention = [0] * before + [1] * len(ids) + [0] * after
    assert parse_tokens({**pads, "attention_mask": attention}, 10).id == parse_tokens(row, 10).id


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ([1], "1 entries, input_ids 3"),
        ([0, 0, 0], "0 everywhere"),
        ([1, 0, 1], "0 between tokens"),
        ([1, 2, 1], "0 to 1"),
    ],
)
def test_an_attention_mask_that_is_no_padding_is_refused(attention, reason):
    with pytest.raises(RowError, match=reason):
        parse_tokens({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "attention_mask": attention}, 10)


def test_a_conversation_among_pretokenized_rows_is_rejected():
    with pytest.raises(RowError, match="a conversation in a data set of pre-tokenized rows"):
        parse_tokens(said(("assistant", "a")))


@pytest.mark.parametrize(
    "answer",
    [
        *({**SAID, key: "hm"} for key in ("reasoning_content", "reasoning", "thinking")),
        {**SAID, "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]},
    ],
)
def test_thoughts_kept_apart_are_part_of_the_answer_and_of_its_identity(answer):
    read, plain = (parse_conversation({"messages": [ASKED, each]}) for each in (answer, SAID))
    assert read.turns == (Turn("user", "a"), Turn("assistant", "b", reasoning="hm"))
    assert read.id != plain.id
    assert read.prompt_key == plain.prompt_key
    assert find_unread_keys({"messages": [ASKED, answer]}) == set()


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_turns_that_a_row_excludes_are_not_trained(key):
    kept = {"role": "assistant", "content": "c", key: True}
    read = parse_conversation({"messages": [{**ASKED, key: 0}, {**SAID, key: 0}, ASKED, kept]})
    assert [turn.trained for turn in read.turns] == [True, False, True, True]
    shared = parse_conversation({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: False},
                                                   {"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]})  # fmt: skip
    assert shared == read


def test_an_empty_system_turn_is_sent_as_it_is():
    """Qwen 2.5 prints a system prompt of its own where there is none."""
    assert parse_conversation(said(("system", ""), ("user", "a"), ("assistant", "b"))).turns[0] == Turn("system", "")


def test_keys_that_are_not_read_are_named():
    row = {
        **said(("user", "a"), ("assistant", "b")),
        "task": "x",
        "long": "y" * 300,
        "list": [1],
        "empty": [],
        "nothing": None,
    }
    row["messages"][0]["name"] = "Ann"
    assert find_unread_keys(row) == {"long", "list", "name of a turn"}
    assert find_unread_keys({"input_ids": [1], "loss_mask": [1], "attention_mask": [1], "labels": [1]}) == {"labels"}
    assert find_unread_keys([1]) == find_unread_keys({"messages": "a"}) - {"messages"} == set()


def test_a_system_prompt_under_a_name_that_is_not_read_is_named_however_short_it_is():
    row = {"messages": [ASKED, {"role": "assistant", "content": "x"}], "system_prompt": "Be a pirate.", "topic": "sea"}
    assert find_unread_keys(row) == {"system_prompt"}
    assert find_unread_keys({**row, "system_prompt": None}) == set()


def test_keys_of_no_format_are_told_with_the_one_that_is_meant():
    with pytest.raises(RowError, match=r"found conversation, model; did you mean conversations\?"):
        parse_conversation({"conversation": [ASKED], "model": "x"})
    with pytest.raises(RowError, match=r"^messages: expected a list, found nothing$"):
        parse_conversation({"messages": None, "id": 1})
    with pytest.raises(RowError, match=r"found message_id, text$"):
        parse_conversation({"message_id": 1, "text": "a"})
