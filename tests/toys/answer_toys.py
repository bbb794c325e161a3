"""Conversations and runs for the tests of those who answer them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftworks.capture.answers.dialogue import Answerer, Dialogue
from draftworks.capture.engine import Generated
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TOKENS_FOLDER, RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn, write_conversations
from draftworks.data.tokenized import TokenizedSet, TokenRow

ON_CPU = CaptureSpec(compute_dtype="float32", device="cpu")


def conversation(number: int, exchanges: int = 1) -> Conversation:
    turns = []
    for exchange in range(exchanges):
        turns += [Turn("user", f"What does function {number} do, part {exchange}?"), Turn("assistant", "It returns.")]
    return Conversation.of(turns, {"number": number})


def answering_run(target: TargetFiles, folder: Path, conversations: Sequence[Conversation], **options) -> RegenerateRun:
    """`options` are of the run, `responses` a dict among them."""
    write_conversations(folder / "source", conversations)
    responses = {"max_new_tokens": 60, "batch_size": 3, **options.pop("responses", {})}
    return RegenerateRun(
        out=folder / "out",
        target=target,
        conversations=folder / "source",
        answers=folder / "answers",
        responses=ResponseSpec(**responses),
        **{"max_length": 400, "capture": ON_CPU, **options},
    )


def rows_of(run: RegenerateRun) -> list[TokenRow]:
    return list(TokenizedSet.open(run.out / TOKENS_FOLDER))


def supervised(chat: ChatTokenizer, row: TokenRow) -> str:
    """What a row teaches, special tokens included."""
    return chat._tokenizer.decode(row.input_ids[np.asarray(row.loss_mask)])


def spelt(chat: ChatTokenizer, row: TokenRow) -> str:
    return chat._tokenizer.decode(row.input_ids)


class Scripted(Answerer):
    """Answers token ids with those of a text, by turn; remembers the prompts."""

    concurrent = False

    def __init__(self, chat: ChatTokenizer, *texts: str, end: str = "<|im_end|>") -> None:
        self._chat = chat
        self._texts = texts
        self._end = end
        self.prompts: list[str] = []

    def __call__(self) -> Scripted:
        return self

    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        self.prompts += [self._chat._tokenizer.decode(dialogue.ids) for dialogue in dialogues]
        ids = self._chat._tokenizer(self._texts[turn] + self._end, add_special_tokens=False)["input_ids"]
        return [Generated(tuple(ids), finished=True) for _ in dialogues]

    def close(self) -> None:
        """Nothing runs."""
