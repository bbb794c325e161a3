"""What a request asks: the same slices as those of a report, and the same digest as that of an eval prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import Conversation, Turn
from draftworks.data.slices import LANGUAGE, add_slice_columns, count_prompt_characters
from draftworks.production.asked import AskedFacts, digest_messages, digest_text, read_asked
from draftworks.storage.identity import token_digest

TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=30)), max_size=5)


def ask(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": each} for each in contents], **more}


@given(TURNS)
def test_slices_are_those_of_a_report(turns: list[tuple[str, str]]):
    turns = [*turns, ("user", "and so on, please")]
    found = read_asked({"messages": [{"role": role, "content": text} for role, text in turns]})
    prompt = Conversation.of([*(Turn(*each) for each in turns), Turn("assistant", "")])
    assert found.language == add_slice_columns(prompt, "any").columns[LANGUAGE]
    assert found.prompt_characters == count_prompt_characters(prompt)
    assert found.turn == sum(role == "user" for role, _ in turns)
    assert found.prompt == digest_messages(turns)


def test_a_body_says_how_it_is_sampled_and_whose_it_is():
    body = ask("Wie geht es dir", temperature=0.5, n=2, chat_template_kwargs={"enable_thinking": False})
    found = read_asked({**body, "metadata": {"app": "chat"}}, {}, "metadata.app")
    assert found == AskedFacts("chat", "de", False, 1, 15, 0.5, 2, digest_messages([("user", "Wie geht es dir")]))
    assert read_asked(ask("x", reasoning_effort="high")).thinking is True
    assert read_asked(ask("x")) == AskedFacts(None, "none", None, 1, 1, None, 1, digest_messages([("user", "x")]))


def test_parts_are_one_text_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    assert read_asked({"messages": messages}).prompt == digest_messages([("system", "s"), ("user", "ab")])


@pytest.mark.parametrize(
    "body",
    [
        ask("a", tools=[{"type": "function"}]),
        ask([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, -1]},
        {"prompt": []},
        {"messages": "a"},
        {"messages": [1]},
        {},
    ],
)
def test_what_is_no_prompt_of_text_is_found_nowhere(body: dict[str, Any]):
    assert read_asked(body).prompt is None


def test_completions_are_known_by_their_tokens_or_their_text():
    for name in ("prompt", "input_ids"):
        assert read_asked({name: [3, 1, 2]}) == AskedFacts(prompt=token_digest([3, 1, 2]))
    assert read_asked({"prompt": [[3, 1]]}).prompt == token_digest([3, 1])
    found = read_asked({"text": "the end of it", "sampling_params": {"temperature": 0, "n": 3}})
    assert found == AskedFacts(None, "en", None, None, 13, 0.0, 3, digest_text("the end of it"))


@pytest.mark.parametrize(
    "odd", [{"temperature": "0"}, {"temperature": True}, {"n": 0}, {"n": 1.5}, {"sampling_params": 1}]
)
def test_settings_of_another_form_are_not_known(odd: dict[str, Any]):
    assert (read_asked(odd).temperature, read_asked(odd).answers) == (None, 1)
