"""Samples of a conversation with its own answers: each is learnt after the ids that a server sends the target for it.

What the target reads for an answer is the template's rendering of the conversation before it, tokenized at once. What it
would have generated is what the template prints from there to the token that ends the turn: thoughts are learnt in the form
in which the template prints them, or, where it drops them, as the data has them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import REASONING_KEYS, Conversation, Turn
from draftworks.data.spans import Span, find_begin_of_thought, find_end_of_thought, find_last_words, holds_words
from draftworks.data.token_rows import TokenRow
from draftworks.errors import DataError

NO_ANSWER = "it has no answer, and responses.mode passthrough trains on the data's own answers: set responses.mode to regenerate"


@dataclass(frozen=True)
class PrintedAnswer:
    """An answer as text.

    Attributes:
        prompt: what a server sends.
        context: what the template prints between prompt and answer, such as an empty thought; read and not learnt.
        said: what the target generates, with the token that ends its turn.
    """

    prompt: str
    context: str
    said: str


@dataclass
class _Sample:
    ids: list[int]
    spans: list[Span]

    def to_row(self, sample_id: str, conversation: Conversation) -> TokenRow:
        end = self.spans[-1].end
        mask = np.zeros(end, dtype=np.bool_)  # (S,)
        for span in self.spans:
            mask[span.start : span.end] = True
        return TokenRow(sample_id, np.array(self.ids[:end], dtype=np.int32), mask, conversation.columns)


def encode_own_answers(chat: ChatTokenizer, conversation: Conversation, only_last_turn: bool = False) -> list[TokenRow]:
    """Return the samples of a conversation. An answer joins the sample whose ids its prompt begins with.

    Elsewhere (after thoughts that the template drops from earlier turns, or a token across the end of a prompt) it begins a
    sample of its own. The last sample has the id of the conversation; earlier ones have that id with a number appended. An
    assistant turn before any user turn is context.

    Raises:
        DataError: no answer to learn, the template refuses the conversation or does not print an answer, or an id is outside
            the target's vocabulary.
    """
    turns = conversation.turns[:-1] if conversation.awaits_answer else conversation.turns
    answered = _list_answered(turns)
    chosen = [number for number in answered if turns[number].trained][-1:] if only_last_turn else answered
    samples: list[_Sample] = []
    for number in chosen:
        _add_answer(samples, chat, turns[: number + 1])
    learnt = [sample for sample in samples if sample.spans]
    if not learnt:
        raise DataError("no supervised token: the chat template marks none of its answers as generated")
    ids = [*(f"{conversation.id}.{number}" for number in range(1, len(learnt))), conversation.id]
    return [sample.to_row(sample_id, conversation) for sample_id, sample in zip(ids, learnt, strict=True)]


def _list_answered(turns: Sequence[Turn]) -> list[int]:
    """Return the numbers of the assistant turns after a user turn."""
    asked = False
    found = []
    for number, turn in enumerate(turns):
        asked = asked or turn.role not in ("system", "assistant")
        if asked and turn.role == "assistant":
            found.append(number)
    if not found:
        raise DataError(NO_ANSWER)
    return found


def _add_answer(samples: list[_Sample], chat: ChatTokenizer, turns: Sequence[Turn]) -> None:
    """Add the last turn; it is learnt unless its data says otherwise, or the template marks other turns only."""
    printed = print_answer(chat, turns)
    prompt = chat.encode_text(printed.prompt)
    if not samples or prompt[: len(samples[-1].ids)] != samples[-1].ids:
        samples.append(_Sample([], []))
    before = [*prompt, *_encode_following(chat, prompt, printed.prompt, printed.context)]
    said = _encode_following(chat, before, printed.prompt + printed.context, printed.said)
    samples[-1].ids = [*before, *said]
    if said and turns[-1].trained and chat.marks_last(turns):
        samples[-1].spans.append(Span(len(before), len(samples[-1].ids)))


def _encode_following(chat: ChatTokenizer, ids: list[int], text: str, following: str) -> list[int]:
    """Return the ids of a text after another one of known ids: as of both at once, where those begin the ids of both."""
    if not following:
        return []
    both = chat.encode_text(text + following)
    return both[len(ids) :] if both[: len(ids)] == ids else chat.encode_text(following)


def print_answer(chat: ChatTokenizer, turns: Sequence[Turn]) -> PrintedAnswer:
    """Return the last of these turns, an assistant's, as the target reads its prompt and generates it.

    Raises:
        DataError: the template refuses the turns or does not print the answer's words, or its prompt begins a thought and the
            answer has none.
    """
    turn, prompt, whole = turns[-1], chat.render(turns[:-1], add_generation_prompt=True), chat.render(turns)
    after = chat.render_after_answer(turns)
    common = len(os.path.commonprefix([prompt, whole]))
    opened, printed = prompt[common:], whole[common:].removesuffix(after)
    closing = after[: chat.end_of_turn.after(after, 0)]
    tail = turn.content[find_end_of_thought(turn.content) :]
    if find_last_words(printed, tail) is None:
        raise DataError(
            f"the chat template changes the assistant's words (beyond white space): of {turn.content[:40]!r} it prints "
            f"{printed[-60:]!r}. Use another template (chat_template)"
        )
    if opened.strip():
        return PrintedAnswer(prompt, "", _continue_opened(turn, opened) + closing)
    start = _find_answer(prompt, printed, turn.content)
    if turn.reasoning:
        if not holds_words(printed[:start], turn.reasoning):
            raise DataError(
                f"the chat template does not print the thoughts that the data keeps apart ({', '.join(REASONING_KEYS)}), "
                f"{turn.reasoning[:40]!r}: put them into the content, as the target writes them, or use another template "
                "(chat_template)"
            )
        start = 0
    if start is None:  # the template drops the thoughts
        return PrintedAnswer(prompt, "", turn.content + closing)
    if not printed[:start].strip():
        start = 0  # blanks after the prompt are generated, often in one token with the first word
    return PrintedAnswer(prompt, printed[:start], printed[start:] + closing)


def _find_answer(prompt: str, printed: str, content: str) -> int | None:
    """Return where an answer begins in what follows its prompt; that may have the mark with which the answer's thought begins."""
    start, begin = find_last_words(printed, content), find_begin_of_thought(content)
    if start is not None or begin is None or content[: begin.start()].strip():
        return start
    return find_last_words(printed, content[begin.end() :]) if prompt.rstrip().endswith(begin[0]) else None


def _continue_opened(turn: Turn, opened: str) -> str:
    """Return what the target generates after a prompt that ends with `opened`, which the template does not print in answers."""
    begin = find_begin_of_thought(opened)
    if begin is None or find_end_of_thought(opened):
        if turn.reasoning or find_end_of_thought(turn.content):
            raise DataError(f"a server's prompt ends with {opened!r}, without a thought, and the data's answer has one")
        return turn.content
    if turn.reasoning:
        line = "\n" if opened.endswith("\n") else ""
        end = begin[0].replace(begin[1], f"/{begin[1]}")
        return f"{turn.reasoning.strip()}{line}{end}{2 * line}{turn.content}"
    if not find_end_of_thought(turn.content):
        raise DataError(
            f"a server's prompt ends with {opened!r}, so that the target's answer begins with a thought, and the data's answer "
            f"{turn.content[:40]!r} has none: let the target answer (responses.mode regenerate), or use another template"
        )
    written = re.match(r"\s*" + r"\s*".join(map(re.escape, opened.split())) + r"\s*", turn.content)
    return turn.content[written.end() :] if written else turn.content
