"""What the target is asked in each turn is what a server sends it, token for token; what is learnt is what it generated.

A server renders the conversation so far by the template and tokenizes it once, as transformers does.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import DATED, TEMPLATES, TOKENIZERS, list_runs, make_chat_target
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.capture.answers.answer_sets import build_token_rows
from draftworks.capture.answers.dialogue import Dialogue
from draftworks.capture.engine import Generated
from draftworks.data.chat import FIXED_DATE, ChatTokenizer
from draftworks.data.conversations import Conversation, Turn
from draftworks.errors import DataError

words = st.text(st.sampled_from("the answer is 3 * é\n聊<>/!"), min_size=1, max_size=12).filter(str.strip)
thoughts = st.builds("<think>\n{}\n</think>\n\n{}".format, words, words)
answers = st.lists(words | thoughts | words.map(" {} ".format), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ChatTokenizer]:
    found: dict[tuple[str, str], ChatTokenizer] = {}
    for tokenizer in TOKENIZERS:
        for name, template in TEMPLATES.items():
            folder = tmp_path_factory.mktemp("chat")
            found[tokenizer, name] = ChatTokenizer.load(make_chat_target(folder, tokenizer, template))
    return found


class FixedDate(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return FIXED_DATE


def ask_server(chat: ChatTokenizer, turns: list[Turn]) -> list[int]:
    """The ids that a server makes of the messages so far."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    asked = chat._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(asked)


def generate(chat: ChatTokenizer, text: str, in_pieces: bool) -> list[int]:
    """Ids of an answer as a target may generate it: also cut where a tokenizer would not, and ended."""
    parts = list(text) if in_pieces else [text]
    return [*(token for part in parts for token in chat.encode_text(part)), chat.eos_ids[-1]]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=10, deadline=None)
@given(said=answers, system=st.none() | words, in_pieces=st.booleans(), data=st.data())
def test_each_turn_is_asked_as_a_server_asks_it(chats, tokenizer, template, said, system, in_pieces, data):
    chat = chats[tokenizer, template]
    questions = [data.draw(words) for _ in said]
    turns = [Turn("system", system)] if system else []
    source = [turn for question in questions for turn in (Turn("user", question), Turn("assistant", "?"))]
    dialogue = Dialogue(Conversation.of([*turns, *source]), chat, 4096)
    asked: list[list[int]] = []
    produced: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", FixedDate)
        for question, text in zip(questions, said):
            turns.append(Turn("user", question))
            assert dialogue.ids == ask_server(chat, turns)
            asked.append(dialogue.ids)
            produced.append(generate(chat, text, in_pieces))
            dialogue.add(Generated(tuple(produced[-1]), True))
            turns.append(Turn("assistant", chat.decode(produced[-1])))
    assert dialogue.done
    rows = build_token_rows(dialogue.to_record(), Conversation.of(source))
    learnt = list_runs(rows)
    assert [ids for _, ids in learnt] == produced  # all that was generated, and nothing else
    assert [before for before, _ in learnt] == asked  # each after what was asked


def test_answers_that_are_read_as_they_were_generated_stay_in_one_sample(chats):
    """Else every long conversation would be captured and trained on once for each of its turns."""
    for tokenizer in ("bytes", "metaspace never"):
        chat = chats[tokenizer, "chatml"]
        source = [turn for n in range(3) for turn in (Turn("user", f"the {n}"), Turn("assistant", "?"))]
        dialogue = Dialogue(Conversation.of(source), chat, 4096)
        while not dialogue.done:
            dialogue.add(Generated(tuple(generate(chat, "the answer", in_pieces=False)), True))
        (row,) = build_token_rows(dialogue.to_record(), Conversation.of(source))
        assert len(list_runs([row])) == 3


def test_answers_of_turns_that_the_data_excludes_are_read_and_not_learnt(chats):
    """In one sample with others, or in samples of their own, where the template drops thoughts."""
    source = [turn for n in range(3) for turn in (Turn("user", f"the {n}"), Turn("assistant", "?", trained=n != 1))]
    for template, samples in (("chatml", 1), ("drops thoughts", 2)):
        chat = chats["bytes", template]
        dialogue = Dialogue(Conversation.of(source), chat, 4096)
        said = iter(["<think>a</think>the answer", "<think>b</think>target", "<think>c</think>model"])
        while not dialogue.done:
            dialogue.add(Generated(tuple(generate(chat, next(said), in_pieces=False)), True))
        rows = build_token_rows(dialogue.to_record(), Conversation.of(source))
        assert len(rows) == samples
        assert [chat.decode(learnt)[-6:] for _, learnt in list_runs(rows)] == ["answer", ">model"]
        last = build_token_rows(dialogue.to_record(), Conversation.of(source), only_last_turn=True)
        assert [chat.decode(learnt)[-6:] for _, learnt in list_runs(last)] == [">model"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=10, deadline=None)
@given(question=words, answer=words.map(str.strip))
def test_an_answer_known_by_its_text_has_the_ids_that_follow_its_prompt(chats, tokenizer, question, answer):
    chat = chats[tokenizer, "chatml"]
    turns = [Turn("user", question), Turn("assistant", answer)]
    prompt = chat.encode_prompt(turns[:1])
    whole = chat.encode_text(chat.render(turns))
    if whole[: len(prompt)] == prompt:  # else the first words and the header share a token
        ids = [*prompt, *chat.encode_answer(turns, ended=True)]
        assert whole[: len(ids)] == ids
        assert ids[-1] == chat.eos_ids[-1]


def test_a_template_that_refuses_the_conversation_is_named(chats):
    chat = chats["bytes", "mistral"]
    with pytest.raises(DataError, match="Only user and assistant roles are supported"):
        Dialogue(Conversation.of([Turn("user", "a"), Turn("tool", "b"), Turn("assistant", "c")]), chat, 4096)


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d %B %Y", "%A, %d/%m/%y %H:%M"])
def test_the_date_of_a_template_is_printed_in_the_form_that_it_asks_for(form, tmp_path: Path):
    template = (
        "{%- macro day() -%}{{- strftime_now('"
        + form
        + "') -}}{%- endmacro -%}{{- day() + ' ' + strftime_now('"
        + form
        + "') -}}"
    )
    chat = ChatTokenizer.load(make_chat_target(tmp_path, "bytes", template))
    printed = FIXED_DATE.strftime(form)
    assert chat.decode(chat.encode_prompt([Turn("user", "a")])) == f"{printed} {printed}"
    other = chat.on_date(datetime(2026, 1, 2))
    assert other.decode(other.encode_prompt([Turn("user", "a")])).startswith(datetime(2026, 1, 2).strftime(form))
    assert other.digest != chat.digest


def test_days_are_no_part_of_the_digest_of_a_template_that_prints_none(chats):
    chat = chats["bytes", "chatml"]
    assert chat.on_date(datetime(2026, 1, 2)).digest == chat.digest
    assert "strftime_now" in DATED
