"""Tokenization of conversations in parallel, with labels for the target's own answers alone."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from draftworks.config.registry_files import DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import (
    ChatTokenizer,
    fill_empty_thought,
    find_end_of_thought,
    find_last_words,
    find_leading_thought,
    find_open_thought,
    holds_words,
    make_end_of_thought,
    measure_common_prefix,
    take_thought,
)
from draftworks.data.conversations import REASONING_KEYS, Conversation, Turn
from draftworks.data.rejected import RejectedSample, check_rejected, count_rejections
from draftworks.data.tokenized import AnsweredSample, CutRow, TokenRow, build_answered_rows, cut_to_length
from draftworks.errors import ConfigError, DataError

NO_ANSWER = "it has no answer for responses.mode passthrough: set responses.mode to regenerate"


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
    samples: list[AnsweredSample] = []
    for number in chosen:
        _add_answer(samples, chat, turns[: number + 1])
    rows = build_answered_rows(samples, conversation)
    if not rows:
        raise DataError("no supervised token: the chat template marks none of its answers as generated")
    return rows


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


def _add_answer(samples: list[AnsweredSample], chat: ChatTokenizer, turns: Sequence[Turn]) -> None:
    """Add the last turn; it is learnt unless its data says otherwise, or the template marks other turns only."""
    printed = print_answer(chat, turns)
    prompt = chat.encode_text(printed.prompt)
    if not samples or prompt[: len(samples[-1].ids)] != samples[-1].ids:
        samples.append(AnsweredSample([], []))
    before = [*prompt, *_encode_following(chat, prompt, printed.prompt, printed.context)]
    said = _encode_following(chat, before, printed.prompt + printed.context, printed.said)
    samples[-1].ids = [*before, *said]
    if said and turns[-1].trained and chat.marks_last(turns):
        samples[-1].spans.append((len(before), len(samples[-1].ids)))


def _encode_following(chat: ChatTokenizer, ids: list[int], text: str, following: str) -> list[int]:
    """Return the ids of a text after another one of known ids: as of both at once, where those begin the ids of both."""
    if not following:
        return []
    both = chat.encode_text(text + following)
    return both[len(ids) :] if both[: len(ids)] == ids else chat.encode_text(following)


def print_answer(chat: ChatTokenizer, turns: Sequence[Turn]) -> PrintedAnswer:
    """Return the last of these turns, an assistant's, as the target reads its prompt and generates it.

    Raises:
        DataError: the template refuses the turns or does not print the answer's words, or the answer's thought is nowhere in
            what the target would generate.
    """
    turn, history, whole = turns[-1], chat.render(turns[:-1]), chat.render(turns)
    prompt, after = chat.render(turns[:-1], add_generation_prompt=True), chat.render_after_answer(turns)
    header = prompt[len(history) :] if prompt.startswith(history) else ""
    opened, printed = _part_at_answer(prompt, header, whole.removesuffix(after))
    if find_last_words(printed, turn.content[find_end_of_thought(turn.content) :]) is None:
        raise DataError(
            f"the chat template changes the assistant's words (beyond white space): of {turn.content[:40]!r} it prints "
            f"{printed[-60:]!r}. Use another template (chat_template)"
        )
    begun = find_open_thought(header or opened)
    if begun is None:
        _require_room_for_thoughts(turn, header or opened, opened)
    repeats = find_leading_thought(turn.content) and (
        opened.strip() or find_last_words(printed, turn.content) is not None
    )
    if begun is not None and (repeats or not find_end_of_thought(printed)):
        answer = _continue_thought(turn, begun, printed)
    elif opened.strip():
        answer = _Answer("" if begun is None else printed[: find_last_words(printed, turn.content)], turn.content)
    else:
        answer = _continue_prompt(turn, prompt, printed)
    return PrintedAnswer(prompt, answer.context, answer.said + chat.find_closing(turns, after))


class _Parted(NamedTuple):
    """The end of a prompt that answers are not printed with, and what is printed in its place, to the answer's end."""

    opened: str
    printed: str


def _part_at_answer(prompt: str, header: str, whole: str) -> _Parted:
    """Part the rendering of an answer where it leaves the prompt's.

    Args:
        header: the end of the prompt that opens the answer; empty if it is not known. Where the answer's turn changes how
            earlier ones are printed, it is looked for.
    """
    common = measure_common_prefix(prompt, whole)
    if common >= len(prompt) - len(header) or not header:
        return _Parted(prompt[common:], whole[common:])
    for length in range(len(header), 0, -1):
        place = whole.rfind(header[:length])
        if place >= 0:
            kept = measure_common_prefix(header, whole[place:])
            return _Parted(header[kept:], whole[place + kept :])
    return _Parted(prompt[common:], whole[common:])


class _Answer(NamedTuple):
    context: str
    said: str


def _continue_prompt(turn: Turn, prompt: str, printed: str) -> _Answer:
    """Return the answer from what the template prints after the prompt. Blanks there belong to it."""
    start = find_last_words(printed, turn.content)
    if turn.reasoning:
        if holds_words(printed[:start], turn.reasoning):
            return _Answer("", printed)
        filled = fill_empty_thought(printed, turn.reasoning)
        if filled is None:
            raise DataError(
                f"the chat template does not print the thoughts that the data keeps apart ({', '.join(REASONING_KEYS)}), "
                f"{turn.reasoning[:40]!r}: put them into the content, as the target writes them, or use another template "
                "(chat_template)"
            )
        return _Answer("", filled)
    begin = find_leading_thought(turn.content)
    if start is None and begin is not None and prompt.rstrip().endswith(begin[0]):
        start = find_last_words(printed, turn.content[begin.end() :])
    if start is None or (begin is not None and find_end_of_thought(printed[:start])):
        return _Answer("", turn.content)  # the template drops the thoughts, or prints an empty one before them
    if not printed[:start].strip():
        start = 0
    return _Answer(printed[:start], printed[start:])


def _require_room_for_thoughts(turn: Turn, header: str, opened: str) -> None:
    """Raise DataError if an answer has a thought, and its prompt has ended the thought already, or ends in another way."""
    thinks = bool(turn.reasoning or find_end_of_thought(turn.content))
    is_closed = not header[find_end_of_thought(header) :].strip() and bool(find_end_of_thought(header))
    if thinks and (is_closed or (turn.reasoning and opened.strip())):
        raise DataError(
            f"prompts end with {header[-24:]!r}, and the answer has a thought: set responses.thinking: true, or leave thoughts out"
        )


def _continue_thought(turn: Turn, begun: re.Match[str], printed: str) -> _Answer:
    """Return the answer to a prompt that begins a thought, where answers are printed without thoughts.

    An answer that has none is learnt after an empty one.
    """
    line = "\n" if begun.string.endswith("\n") else ""
    words = turn.content[find_end_of_thought(turn.content) :]
    whole = find_last_words(printed, turn.content)
    before = printed[: find_last_words(printed, words) if whole is None else whole].lstrip()
    context = f"{line}{make_end_of_thought(begun)}{2 * line}{before}"
    if turn.reasoning:
        return _Answer("", turn.reasoning.strip() + context + turn.content)
    if words == turn.content:
        return _Answer(context, turn.content)
    begin = find_leading_thought(turn.content)
    if begin is not None and begin[0] != begun[0]:  # in the marks of another family
        return _Answer("", take_thought(turn.content) + context + words.lstrip())
    said = turn.content if begin is None else turn.content[begin.end() :]
    return _Answer("", said.lstrip("\n") if line else said)


CHUNK = 256
"""Conversations sent to a process at a time."""
PER_PROCESS = 2000
"""Conversations per process: starting one takes seconds, to import the tokenizer."""

Progress = Callable[[str], None]
"""Called with one line after each chunk."""


@dataclass(frozen=True)
class TokenizeResult:
    """Samples in the order of their conversations, and counts of what was cut or rejected."""

    rows: tuple[TokenRow, ...]
    cut_samples: int
    cut_supervised_tokens: int
    rejected: tuple[RejectedSample, ...]

    def counts(self) -> dict[str, Any]:
        """Return what was cut and rejected, for the summary of `write_tokens`."""
        cut = {"cut_samples": self.cut_samples, "cut_supervised_tokens": self.cut_supervised_tokens}
        return {**cut, **count_rejections(self.rejected)}

    @property
    def supervised_share(self) -> float:
        """Supervised tokens per token, compared with `min_supervised_share`."""
        return sum(row.supervised for row in self.rows) / max(sum(len(row) for row in self.rows), 1)


class CutSamples(NamedTuple):
    """The samples of one conversation within the length limit, and how many samples and supervised tokens were cut."""

    rows: tuple[TokenRow, ...]
    cut: int
    cut_supervised: int


class _Work(NamedTuple):
    """What a worker process needs."""

    target: TargetFiles
    only_last_turn: bool
    max_length: int
    thinking: bool | None


def tokenize(
    conversations: Iterable[Conversation],
    target: TargetFiles,
    data: DataSpec,
    max_length: int,
    progress: Progress | None = None,
    per_process: int = PER_PROCESS,
    thinking: bool | None = None,
) -> TokenizeResult:
    """Tokenize with the target's chat template, in up to `data.workers` processes.

    Args:
        thinking: as `ChatTokenizer.load`.

    Raises:
        ConfigError: `max_length` is longer than the target's context, or the template has no switch for thinking.
        DataError: the tokenizer cannot be used, or more than `data.max_rejected_share` of the conversations give no
            sample (the template refuses them, or nothing supervised is within `max_length`).
    """
    check_length(target, max_length)
    items = list(conversations)
    work = _Work(target, data.only_last_turn, max_length, thinking)
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    processes = min(data.workers, max(len(items) // per_process, 1), max(len(chunks), 1))
    done = _in_processes(work, chunks, processes) if processes > 1 else map(partial(_encode_chunk, work), chunks)
    return _collect(done, len(items), data.max_rejected_share, progress)


def cut_rows(rows: Iterable[TokenRow], target: TargetFiles, data: DataSpec, max_length: int) -> TokenizeResult:
    """Cut pre-tokenized rows to the same length limit; errors as `tokenize`."""
    check_length(target, max_length)
    items = list(rows)
    return _collect(
        [[cut_or_reject(row.sample_id, lambda row=row: [row], max_length) for row in items]],
        len(items),
        data.max_rejected_share,
    )


def check_length(target: TargetFiles, max_length: int) -> None:
    """Raise ConfigError if samples of `max_length` tokens do not fit the target's context."""
    if max_length > target.context:
        raise ConfigError(
            f"target {target.name}: max_length {max_length} is longer than the model's context of {target.context}"
            f" tokens: set max_length to {target.context} or less"
        )


def _collect(
    chunks: Iterable[Sequence[CutSamples | RejectedSample]], total: int, limit: float, progress: Progress | None = None
) -> TokenizeResult:
    kept: list[CutSamples] = []
    rejected: list[RejectedSample] = []
    for chunk in chunks:
        for each in chunk:
            if isinstance(each, RejectedSample):
                rejected.append(each)
            else:
                kept.append(each)
        if progress is not None:
            progress(f"tokenized {len(kept) + len(rejected):,} of {total:,} conversations")
    check_rejected(rejected, total, limit)
    return TokenizeResult(
        rows=tuple(row for each in kept for row in each.rows),
        cut_samples=sum(each.cut for each in kept),
        cut_supervised_tokens=sum(each.cut_supervised for each in kept),
        rejected=tuple(rejected),
    )


def _in_processes(work: _Work, chunks: list[list[Conversation]], processes: int) -> Iterator[list]:
    """Yield encoded chunks in order. Workers are spawned: forking a process with threads (a Dagster step) may hang."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, mp_context=context, initializer=enter_worker) as pool:
            yield from pool.map(partial(_encode_chunk, work), chunks)
    except BrokenProcessPool as error:
        raise DataError(
            f"a tokenizer process died (out of memory?); {processes} were running: lower data.workers"
        ) from error


def enter_worker() -> None:
    """Initialise a tokenizer process: one thread, and an exit when its parent dies, even by a kill.

    The pool alone does not ensure that: its processes hold both ends of their queue and would wait for ever.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _tokenizer(target: TargetFiles, thinking: bool | None) -> ChatTokenizer:
    return ChatTokenizer.load(target, thinking)


def _encode_chunk(work: _Work, conversations: Sequence[Conversation]) -> list[CutSamples | RejectedSample]:
    chat = _tokenizer(work.target, work.thinking)  # pyright: ignore[reportArgumentType] - frozen models have a hash
    return [
        cut_or_reject(
            each.id, partial(encode_own_answers, chat.choose(each), each, work.only_last_turn), work.max_length
        )
        for each in conversations
    ]


def cut_or_reject(sample_id: str, make: Callable[[], list[TokenRow]], max_length: int) -> CutSamples | RejectedSample:
    """Cut the samples of a conversation. One without a supervised token within the limit is left out, if another has one."""
    try:
        rows = make()
    except DataError as error:
        return RejectedSample(sample_id, str(error))
    kept: list[CutRow] = []
    reasons: list[str] = []
    for row in rows:
        try:
            kept.append(cut_to_length(row, max_length))
        except DataError as error:
            reasons.append(str(error))
    if not kept:
        return RejectedSample(sample_id, reasons[0])
    lost = sum(row.supervised for row in rows) - sum(each.row.supervised for each in kept)
    return CutSamples(tuple(each.row for each in kept), sum(each.was_cut for each in kept) + len(reasons), lost)
