"""Tokenization of conversations in parallel; the result does not depend on the number of processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from draftworks.config.registry_files import DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation
from draftworks.data.rejected import RejectedSample, check_rejected, count_rejections
from draftworks.data.token_rows import CutRow, TokenRow, cut_to_length
from draftworks.errors import ConfigError, DataError

CHUNK = 256
"""Conversations sent to a process at a time."""
PER_PROCESS = 2000
"""Conversations per process: starting one takes seconds, to import the tokenizer."""

NO_ANSWER = "it has no answer for responses.mode passthrough: set responses.mode to regenerate"

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
        [[_cut_or_reject(row.sample_id, lambda row=row: row, max_length) for row in items]],
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
    chunks: Iterable[Sequence[CutRow | RejectedSample]], total: int, limit: float, progress: Progress | None = None
) -> TokenizeResult:
    kept: list[CutRow] = []
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
        rows=tuple(each.row for each in kept),
        cut_samples=sum(each.was_cut for each in kept),
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


def _encode_chunk(work: _Work, conversations: Sequence[Conversation]) -> list[CutRow | RejectedSample]:
    chat = _tokenizer(work.target, work.thinking)  # pyright: ignore[reportArgumentType] - frozen models have a hash
    encode = partial(encode_answers, chat, only_last_turn=work.only_last_turn)
    return [_cut_or_reject(each.id, partial(encode, each), work.max_length) for each in conversations]


def encode_answers(chat: ChatTokenizer, conversation: Conversation, only_last_turn: bool) -> TokenRow:
    """Return the sample of a conversation with its own answers. Raises DataError as `ChatTokenizer.encode`, or without any."""
    if conversation.awaits_answer:
        conversation = replace(conversation, turns=conversation.turns[:-1])
        if not any(turn.role == "assistant" for turn in conversation.turns):
            raise DataError(NO_ANSWER)
    encoded = chat.choose(conversation).encode(conversation, only_last_turn)
    return TokenRow(conversation.id, encoded.input_ids, encoded.loss_mask, conversation.columns)


def _cut_or_reject(sample_id: str, make: Callable[[], TokenRow], max_length: int) -> CutRow | RejectedSample:
    try:
        return cut_to_length(make(), max_length)
    except DataError as error:
        return RejectedSample(sample_id, str(error))
