"""Own answers are learnt after what a server sends: all of each answer and nothing else, to the token that ends the turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chat_tokenizers import (
    CHATML,
    DROPS_THOUGHTS,
    FORGETS,
    KEEPS_APART,
    TEMPLATES,
    TOKENIZERS,
    list_runs,
    make_chat_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import ANSWER, Conversation, Turn
from draftworks.data.tokenized import TokenRow
from draftworks.data.tokenizing import encode_own_answers, print_answer
from draftworks.errors import DataError

MARKED = {
    "markers around the words": "{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{{- '<|end|>\\n' -}}",
    "markers around words and end": "{%- generation -%}{{- m['content'] + '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
}
CHANNELS = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{%- if m.thinking is string and loop.last -%}"
    "{{- '<|start|>assistant/think\\n' + m.thinking + '</s>' -}}{%- endif -%}"
    "{{- '<|start|>assistant/answer\\n' + m['content'] + ('<|end|>' if loop.last else '</s>') -}}"
    "{%- else -%}{{- '<|start|>user\\n' + m['content'] + '</s>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
"""As gpt-oss: thoughts in a channel of their own, and earlier answers closed otherwise than generated ones."""

words = st.text(st.sampled_from("the answer is 3 * é\n聊<>/!"), min_size=1, max_size=12).filter(str.strip)
thoughts = st.builds("<think>\n{}\n</think>\n\n{}".format, words, words)
ENDS = ("<|end|>", "</s>")


def mark(words_and_end: str) -> str:
    return (
        "{%- for m in messages -%}{{- '<|start|>' + m['role'] + '\\n' -}}{%- if m['role'] == 'assistant' -%}"
        + words_and_end
        + "{%- else -%}{{- m['content'] + '<|end|>\\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
    )


ALL = TEMPLATES | {name: mark(text) for name, text in MARKED.items()}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ChatTokenizer]:
    return {
        (tokenizer, name): ChatTokenizer.load(make_chat_target(tmp_path_factory.mktemp("chat"), tokenizer, template))
        for tokenizer in TOKENIZERS
        for name, template in ALL.items()
    }


def talk(*said: str) -> list[Turn]:
    return [Turn("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(said)]


def squeeze(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=10, deadline=None)
@given(said=st.lists(st.tuples(words, words | thoughts), min_size=1, max_size=3))
def test_each_answer_is_learnt_whole_after_what_a_server_sends(chats, tokenizer, template, said):
    """Thoughts are learnt with their answer; an empty thought that the template adds is read."""
    chat = chats[tokenizer, template]
    turns = talk(*(text for pair in said for text in pair))
    runs = list_runs(encode_own_answers(chat, Conversation.of(turns)))
    assert len(runs) == len(said)
    for number, (before, learnt) in enumerate(runs):
        asked = chat.encode_prompt(turns[: 2 * number + 1])
        assert before[: len(asked)] == asked
        assert chat._tokenizer.convert_ids_to_tokens(learnt[-1]) in ENDS
        content = said[number][1]
        if len(before) > len(asked):
            assert squeeze(chat.decode(before[len(asked) :])) in ("<think></think>", "</think>")
        learnt_words = squeeze(chat.decode(learnt))
        assert squeeze(chat.decode(chat.encode_text(content))).endswith(learnt_words)
        if "<think>" not in content or template != "opens a thought":  # there the prompt has the thought's beginning
            assert learnt_words == squeeze(chat.decode(chat.encode_text(content)))


def learn(folder: Path, template: str, turns: list[Turn], only_last_turn: bool = False) -> list[str]:
    """Return the samples as text, with brackets around what is learnt."""
    chat = ChatTokenizer.load(make_chat_target(folder, "bytes", template))
    return [show(chat, row) for row in encode_own_answers(chat, Conversation.of(turns), only_last_turn)]


def show(chat: ChatTokenizer, row: TokenRow) -> str:
    pieces = [chat._tokenizer.decode([token]) for token in row.input_ids.tolist()]
    return "".join(f"{{{text}}}" if on else text for text, on in zip(pieces, row.loss_mask)).replace("}{", "")


def test_one_turn_whose_thought_is_dropped_later_is_a_sample_and_the_next_turn_another(tmp_path):
    turns = talk("a", "<think>it is</think>the answer", "b", "<think>or</think>not")
    assert learn(tmp_path, DROPS_THOUGHTS, turns) == [
        "<|start|>user\na<|end|>\n<|start|>assistant\n{<think>\nit is\n</think>\n\nthe answer<|end|>}",
        "<|start|>user\na<|end|>\n<|start|>assistant\nthe answer<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\n"
        "{<think>\nor\n</think>\n\nnot<|end|>}",
    ]


def test_thoughts_that_data_keeps_apart_are_learnt_as_the_template_prints_them(tmp_path):
    turns = [Turn("user", "a"), Turn("assistant", "the answer", reasoning="it is")]
    expected = "<|start|>user\na<|end|>\n<|start|>assistant\n{<think>\nit is\n</think>\n\nthe answer<|end|>}"
    assert learn(tmp_path / "apart", KEEPS_APART, turns) == [expected]
    inline = talk("a", "<think>\nit is\n</think>\n\nthe answer")
    assert learn(tmp_path / "inline", KEEPS_APART, inline) == [expected]
    with pytest.raises(DataError, match=r"does not print the thoughts that the data keeps apart \(reasoning_content"):
        learn(tmp_path / "chatml", CHATML, turns)


@pytest.mark.parametrize(
    ("opened", "inline", "learnt"),
    [
        ("<think>\n", "<think>\nit is\n</think>\n\nso", "it is\n</think>\n\nso"),
        ("<think>\n", "it is\n</think>\n\nso", "it is\n</think>\n\nso"),
        ("<think>", "<think>it is</think>so", "it is</think>so"),
        ("", "<think>\nit is\n</think>\n\nso", "<think>\nit is\n</think>\n\nso"),
    ],
)
def test_a_template_that_never_prints_thoughts_has_them_learnt_as_the_target_writes_them(
    opened, inline, learnt, tmp_path
):
    template = FORGETS + "{{- '" + opened.replace("\n", "\\n") + "' -}}{%- endif -%}"
    before = "<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert learn(tmp_path, template, talk("a", inline)) == [f"{before}{opened}{{{learnt}<|end|>}}"]
    rows = learn(tmp_path, template, talk("a", inline, "b", inline))
    assert rows[1].startswith(before + "so<|end|>\n<|start|>user\nb")
    if opened:
        apart = [Turn("user", "a"), Turn("assistant", "so", reasoning="it is")]
        assert learn(tmp_path, template, apart) == [f"{before}{opened}{{{learnt}<|end|>}}"]


FAMILIES = {
    "GLM 4.7": (
        "{{- '<|start|>assistant\n' + ('<think>' + m.reasoning_content + '</think>' if m.reasoning_content is string else '</think>')"
        " + content + '<|end|>' -}}",
        "<think>",
    ),
    "MiniMax M2": (
        "{{- '<|start|>assistant\n' + ('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content is string"
        " else '') + content + '<|end|>' -}}",
        "<think>\n",
    ),
    "Command A": (
        "{{- '<|start|>assistant\n' + ('<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' if m.reasoning_content is"
        " string else '') + '<|START_TEXT|>' + content + '[/INST]<|end|>' -}}",
        "<|START_THINKING|>",
    ),
    "Kimi K2": ("{{- '<|start|>assistant\n<think></think>' + content + '<|end|>' -}}", ""),
    "Nemotron": ("{{- '<|start|>assistant\n<think>\n' + content + '<|end|>' -}}", "<think>\n"),
    "Apertus": ("{{- '<|start|>assistant\n' + content + ('' if loop.last else '<|end|>') -}}", ""),
    "LFM2": (
        "{{- '<|start|>assistant\n' + (content if loop.index0 == ns.last else content.split('</think>')[-1].lstrip()) + '<|end|>' -}}",
        "",
    ),
}
"""What templates of families do: how an answer is printed, and what follows the header of the prompt."""


def family(name: str) -> str:
    answer, opened = FAMILIES[name]
    return (
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
        "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}{%- set content = m['content'] -%}"
        "{%- if m['role'] == 'assistant' -%}"
        + answer
        + "{%- else -%}{{- '<|start|>user\n' + content + '<|end|>' -}}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant\n" + opened + "' -}}{%- endif -%}"
    ).replace("\n", "\\n")


@pytest.mark.parametrize(
    ("name", "plain", "thinking"),
    [
        ("GLM 4.7", "<think></think>{so<|end|>}", "<think>{hm</think>so<|end|>}"),
        ("MiniMax M2", "<think>\n\n</think>\n\n{so<|end|>}", "<think>\n{hm\n</think>\n\nso<|end|>}"),
        (
            "Command A",
            "<|START_THINKING|><|END_THINKING|><|START_TEXT|>{so[/INST]<|end|>}",
            "<|START_THINKING|>{hm<|END_THINKING|><|START_TEXT|>so[/INST]<|end|>}",
        ),
        ("Kimi K2", "<think></think>{so<|end|>}", "{<think>hm</think>so<|end|>}"),
        ("Nemotron", "<think>\n\n</think>\n\n{so<|end|>}", "<think>\n{hm\n</think>\n\nso<|end|>}"),
        ("Apertus", "{so<|end|>}", None),
        ("LFM2", "{so<|end|>}", None),
    ],
)
def test_answers_of_every_family_are_learnt_in_its_own_form(name, plain, thinking, tmp_path):
    """An answer without a thought after an empty one, where every prompt begins a thought."""
    before = "<|start|>user\na<|end|><|start|>assistant\n"
    assert learn(tmp_path / "plain", family(name), talk("a", "so")) == [before + plain]
    inline = "<think>\nhm\n</think>\n\nso" if "\n" in (thinking or "\n") else "<think>hm</think>so"
    (learnt,) = learn(tmp_path / "inline", family(name), talk("a", inline))
    assert learnt == before + (thinking or f"{{{inline}<|end|>}}")
    if thinking is not None:
        apart = [Turn("user", "a"), Turn("assistant", "so", reasoning="hm")]
        assert learn(tmp_path / "apart", family(name), apart) == [before + thinking]
    last = learn(tmp_path / "turns", family(name), talk("a", inline, "b", inline))[-1]
    assert last.endswith(learnt.removeprefix(before)[-20:])
    assert "<|start|>user\nb<|end|><|start|>assistant\n" in last


def test_thoughts_are_refused_where_every_prompt_has_ended_the_thought(tmp_path):
    closed = FORGETS + "{{- '<think></think>' -}}{%- endif -%}"
    for said in (Turn("assistant", "<think>b</think>so"), Turn("assistant", "so", reasoning="b")):
        with pytest.raises(DataError, match=r"end with '.*<think></think>', and the answer has a thought: set resp"):
            learn(tmp_path, closed, [Turn("user", "a"), said])
    assert learn(tmp_path, closed, talk("a", "so")) == [
        "<|start|>user\na<|end|>\n<|start|>assistant\n<think></think>{so<|end|>}"
    ]


def test_answers_are_closed_as_they_are_generated_and_read_as_they_are_sent(tmp_path):
    turns = [Turn("user", "a"), Turn("assistant", "so", reasoning="it is"), Turn("user", "b"), Turn("assistant", "no")]
    assert learn(tmp_path, CHANNELS, turns) == [
        "<|start|>user\na</s><|start|>assistant{/think\nit is</s><|start|>assistant/answer\nso<|end|>}",
        "<|start|>user\na</s><|start|>assistant/answer\nso</s><|start|>user\nb</s><|start|>assistant/answer\n{no<|end|>}",
    ]


def test_answers_that_are_read_as_they_were_said_stay_in_one_sample(chats):
    for tokenizer in ("bytes", "metaspace never"):
        rows = encode_own_answers(chats[tokenizer, "chatml"], Conversation.of(talk(*"abcdef")))
        assert [len(list_runs([row])) for row in rows] == [3]


def test_turns_that_the_data_excludes_are_read_and_not_learnt(chats):
    chat, turns = chats["bytes", "chatml"], talk("a", "the", "b", "so", "c", "no")
    turns[3] = replace(turns[3], trained=False)
    (row,) = encode_own_answers(chat, Conversation.of(turns))
    assert [chat.decode(said) for _, said in list_runs([row])] == ["the", "no"]
    turns[5] = replace(turns[5], trained=False)
    (row,) = encode_own_answers(chat, Conversation.of(turns), only_last_turn=True)
    assert [chat.decode(said) for _, said in list_runs([row])] == ["the"]
    assert row.loss_mask[-1], "nothing is kept behind the last answer that is learnt"


def test_an_assistant_that_speaks_first_is_read_and_not_learnt(chats):
    chat = chats["bytes", "chatml"]
    turns = [Turn("system", "be"), Turn("assistant", "the"), Turn("user", "a"), Turn("assistant", "so")]
    (row,) = encode_own_answers(chat, Conversation.of(turns))
    assert [chat.decode(said) for _, said in list_runs([row])] == ["so"]
    for nothing in (turns[:2], [turns[2], ANSWER]):
        with pytest.raises(DataError, match="it has no answer for responses.mode passthrough"):
            encode_own_answers(chat, Conversation.of(nothing))


def test_several_samples_of_a_conversation_are_numbered_and_the_last_has_its_id(chats):
    conversation = Conversation.of(talk("a", "<think>b</think>c", "d", "<think>e</think>f"))
    rows = encode_own_answers(chats["bytes", "drops thoughts"], conversation)
    assert [row.sample_id for row in rows] == [f"{conversation.id}.1", conversation.id]


def test_words_that_the_template_prints_elsewhere_too_are_found_where_the_answer_ends(chats):
    for words_said in ("think", "end", "assistant"):
        printed = print_answer(chats["bytes", "drops thoughts"], talk("a", words_said))
        assert (printed.context, printed.said) == ("<think>\n\n</think>\n\n", f"{words_said}<|end|>")
