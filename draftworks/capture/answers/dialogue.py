"""One conversation whose assistant turns are being written anew, as the exact tokens the target saw and said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from draftworks.capture.engine import Generated
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.token_rows import TokenRow
from draftworks.errors import DataError


class Dialogue:
    """Prompt ids + generated ids (+ continuation ids + generated ids ...).

    Generated ids are kept as they were, never decoded and tokenized again. Where the template goes on with something else
    than prompt and answer as they were (without the thoughts of earlier answers, say), the next answer begins a sample of
    its own, so that every supervised token follows what the target saw when it said it. An assistant turn that opens the
    conversation is context; one that follows another without a turn between is left out.

    Args:
        max_length: most tokens of a sample.
        rendered: the target is given messages: what it sees is always what the template prints of the conversation so far.

    Attributes:
        refused: why nobody answers it.

    Raises:
        DataError: no assistant turn to write, the template refuses the conversation, or the prompt leaves no room.
    """

    def __init__(
        self, conversation: Conversation, chat: ChatTokenizer, max_length: int, rendered: bool = False
    ) -> None:
        self.id = conversation.id
        self._rendered = rendered
        self._chat = chat
        self._max_length = max_length
        self._asked = _split_questions(conversation.turns)
        if not self._asked:
            raise DataError("no assistant turn after a user's")
        self._questions = len(self._asked)
        self._turns = list(self._asked.pop(0))
        self.ids = chat.encode_prompt(self._turns)
        self._spans: list[tuple[int, int]] = []
        self._earlier: list[dict[str, Any]] = []
        self._answered = 0
        self.generated = 0
        self._unfinished = False
        self.done = False
        self.stopped: str | None = None
        self.refused: str | None = None
        if len(self.ids) >= max_length:
            raise DataError(
                f"its prompt has {len(self.ids)} tokens, which leaves no room for a response within max_length {max_length}"
            )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far."""
        return tuple(self._turns)

    def add(self, response: Generated) -> None:
        """Take the response to `ids`, then whatever leads up to the next one; `done` if there is no next one.

        `stopped` says why, if the template refuses to go on after this response.
        """
        self._spans.append((len(self.ids), len(self.ids) + len(response.ids)))
        self._answered += 1
        self.generated += len(response.ids)
        self.ids = [*self.ids, *response.ids]
        self._turns.append(Turn("assistant", self._chat.decode(response.ids)))
        self._unfinished = not response.finished
        if self._unfinished or not self._asked:
            self.done = True
            return
        following = self._asked.pop(0)
        try:
            continued = self._render_continuation(following)
        except DataError as error:
            self.done, self.stopped = True, str(error)
            return
        if len(continued) >= self._max_length:
            self.done = True
            return
        if continued[: len(self.ids)] != self.ids:
            self._earlier.append(self._make_sample())
            self._spans = []
        self.ids = continued
        self._turns.extend(following)

    def _render_continuation(self, following: tuple[Turn, ...]) -> list[int]:
        """What the target sees next: up to and with the header of the next answer."""
        if not self._rendered and self._chat.keeps_answer(self._turns, following):
            return [*self.ids, *self._chat.encode_continuation(self._turns, following)]
        return self._chat.encode_prompt([*self._turns, *following])

    def _make_sample(self) -> dict[str, Any]:
        return {"ids": self.ids, "generated": self._spans}

    def to_record(self) -> dict[str, Any]:
        """What is written to the partial file: the sample, whether its last answer was cut by a limit, and how many
        answers were never written because the conversation stopped; in `earlier`, samples that end with earlier answers.
        """
        earlier = {"earlier": self._earlier} if self._earlier else {}
        return {
            "id": self.id,
            **self._make_sample(),
            **earlier,
            "turns": [[turn.role, turn.content] for turn in self._turns],
            "unfinished": self._unfinished,
            "dropped_turns": self._questions - self._answered,
        }


def build_token_rows(record: Mapping[str, Any], original: Conversation, only_last_turn: bool = False) -> list[TokenRow]:
    """The tokenized samples of a record: the masks cover what was generated (or the last turn) and nothing else.

    The last sample has the id of the conversation, earlier ones have it with a number behind.
    """
    last = _make_token_row(record, original.id, original, only_last_turn)
    if only_last_turn:
        return [last]
    earlier = enumerate(record.get("earlier", []), start=1)
    return [*(_make_token_row(sample, f"{original.id}.{number}", original) for number, sample in earlier), last]


def build_conversation(record: Mapping[str, Any], original: Conversation) -> Conversation:
    """The conversation of a record, under the id of the one it was made from."""
    return Conversation(original.id, tuple(Turn(*turn) for turn in record["turns"]), original.columns)


def _make_token_row(
    sample: Mapping[str, Any], sample_id: str, original: Conversation, only_last_turn: bool = False
) -> TokenRow:
    mask = np.zeros(len(sample["ids"]), dtype=np.bool_)
    for start, end in sample["generated"][-1 if only_last_turn else 0 :]:
        mask[start:end] = True
    return TokenRow(sample_id, np.array(sample["ids"], dtype=np.int32), mask, original.columns)


def _split_questions(turns: tuple[Turn, ...]) -> list[tuple[Turn, ...]]:
    """What precedes each assistant turn that is to be written."""
    questions, pending, asked = [], [], False
    for turn in turns:
        if turn.role != "assistant":
            pending.append(turn)
            asked = asked or turn.role != "system"
        elif asked:
            questions.append(tuple(pending))
            pending, asked = [], False
        elif not questions:
            pending.append(turn)
    return questions
