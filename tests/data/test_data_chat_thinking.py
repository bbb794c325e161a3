"""Templates of models that think: the switch, and answers known by their text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from test_data_chat import FAMILIES, QUICK, conversations
from thinking import THINKING_TEMPLATE, thinking_target

from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn
from draftworks.errors import ConfigError

ASKED = [Turn("user", "What is a pipe?")]
THOUGHT = "<think>\nA kind of buffer.\n</think>\n\nIt connects processes."


@pytest.fixture
def target(tiny_target: TargetFiles, tmp_path: Path) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path)


def prompt(chat: ChatTokenizer, turns: list[Turn]) -> str:
    return chat._tokenizer.decode(chat.encode_prompt(turns))


def test_the_switch_reaches_the_template(target):
    by_default, on, off = (ChatTokenizer.load(target, thinking) for thinking in (None, True, False))
    assert prompt(on, ASKED) == prompt(by_default, ASKED)
    assert prompt(off, ASKED) == prompt(on, ASKED) + "<think>\n\n</think>\n\n"
    assert (on.template_options, off.template_options) == ({"enable_thinking": True}, {"enable_thinking": False})


def test_a_switch_of_another_name_is_found(target):
    path = Path(target.chat_template)
    path.write_text(THINKING_TEMPLATE.replace("enable_thinking", "thinking"))
    assert ChatTokenizer.load(target, False).template_options == {"thinking": False}


def test_a_template_without_a_switch_refuses_the_choice(tiny_target):
    for thinking in (True, False):
        with pytest.raises(
            ConfigError, match=r"no switch for thinking \(none of enable_thinking, thinking .*leave responses"
        ):
            ChatTokenizer.load(tiny_target, thinking)


def test_what_the_template_is_told_is_part_of_the_digest(target):
    assert len({ChatTokenizer.load(target, thinking).digest for thinking in (None, True, False)}) == 3


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(conversation=conversations())
def test_prompt_and_answer_from_text_spell_the_rendered_conversation(chats, family, conversation):
    chat = chats[f"{family}-plain"]
    turns = list(conversation.turns)
    if family != "qwen":
        turns[-1] = Turn("assistant", turns[-1].content.strip())
    end = "<|im_end|>" if family == "qwen" else "<|eot_id|>"
    spelt = "".join(
        chat._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in (chat.encode_prompt(turns[:-1]), chat.encode_answer(turns, ended=True))
    )
    assert chat.render(turns).startswith(spelt)
    assert spelt.endswith(turns[-1].content + end)
    assert (
        chat.encode_answer(turns, ended=False)
        == chat._tokenizer(turns[-1].content, add_special_tokens=False)["input_ids"]
    )
