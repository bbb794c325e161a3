"""Labels are the answer, all of it and nothing else: from the first token after the prompt to the token that ends the turn."""

from __future__ import annotations

import numpy as np
import pytest
from chat_tokenizers import TEMPLATES, TOKENIZERS, make_chat_target
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn

PLAIN = ("chatml", "dated", "mistral", "gemma", "macros", "blanks before the end")
"""Templates that print an answer's words as they are, or stripped."""
MARKED = {
    "markers around the words": "{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{{- '<|end|>\\n' -}}",
    "markers around words and end": "{%- generation -%}{{- m['content'] + '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
}
words = st.text(st.sampled_from("the answer is 3 * é\n聊<>/!"), min_size=1, max_size=12).filter(str.strip)
ENDS = ("<|end|>", "</s>")


def mark(words_and_end: str) -> str:
    return (
        "{%- for m in messages -%}{{- '<|start|>' + m['role'] + '\\n' -}}{%- if m['role'] == 'assistant' -%}"
        + words_and_end
        + "{%- else -%}{{- m['content'] + '<|end|>\\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
    )


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ChatTokenizer]:
    templates = {name: TEMPLATES[name] for name in PLAIN} | {name: mark(text) for name, text in MARKED.items()}
    return {
        (tokenizer, name): ChatTokenizer.load(make_chat_target(tmp_path_factory.mktemp("chat"), tokenizer, template))
        for tokenizer in TOKENIZERS
        for name, template in templates.items()
    }


@pytest.mark.parametrize("template", [*PLAIN, *MARKED])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=10, deadline=None)
@given(said=st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_labels_begin_after_the_prompt_and_end_with_the_turn(chats, tokenizer, template, said):
    chat = chats[tokenizer, template]
    turns = [turn for question, answer in said for turn in (Turn("user", question), Turn("assistant", answer))]
    ids, mask = chat.encode(Conversation.of(turns))
    runs = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0])).reshape(-1, 2)
    assert len(runs) == len(said)
    for number, (start, end) in enumerate(runs):
        assert chat._tokenizer.convert_ids_to_tokens(int(ids[end - 1])) in ENDS
        prompt = chat.encode_prompt(turns[: 2 * number + 1])
        spoken, answer = ("".join(text.split()) for text in (chat.decode(ids[start:end].tolist()), said[number][1]))
        assert answer.endswith(spoken)
        if ids[: len(prompt)].tolist() == prompt:  # else a token spans prompt and answer, and is no label
            assert (start, spoken) == (len(prompt), answer)
