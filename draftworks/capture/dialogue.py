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

    Generated ids are kept as they were, never decoded and tokenized again. An assistant turn that opens the
    conversation is context; one that follows another without a turn between is left out.

    Args:
        max_length: most tokens of the sample.

    Raises:
        DataError: no assistant turn to write, the template refuses the conversation, or the prompt leaves no room.
    """

    def __init__(self, conversation: Conversation, chat: ChatTokenizer, max_length: int) -> None:
        self.id = conversation.id
        self._chat = chat
        self._max_length = max_length
        self._asked = _questions(conversation.turns)
        if not self._asked:
            raise DataError("no assistant turn after a user's")
        self._questions = len(self._asked)
        self._turns = list(self._asked.pop(0))
        self.ids = chat.prompt_ids(self._turns)
        self._spans: list[tuple[int, int]] = []
        self._unfinished = False
        self.done = False
        self.stopped: str | None = None
        if len(self.ids) >= max_length:
            raise DataError(
                f"its prompt has {len(self.ids)} tokens, which leaves no room for a response within max_length {max_length}"
            )

    def add(self, response: Generated) -> None:
        """Take the response to `ids`, then whatever leads up to the next one; `done` if there is no next one.

        `stopped` says why, if the template refuses to go on after this response.
        """
        self._spans.append((len(self.ids), len(self.ids) + len(response.ids)))
        self.ids = [*self.ids, *response.ids]
        self._turns.append(Turn("assistant", self._chat.decode(response.ids)))
        self._unfinished = not response.finished
        if self._unfinished or not self._asked:
            self.done = True
            return
        following = self._asked.pop(0)
        try:
            continued = [*self.ids, *self._chat.continuation_ids(self._turns, following)]
        except DataError as error:
            self.done, self.stopped = True, str(error)
            return
        if len(continued) >= self._max_length:
            self.done = True
            return
        self.ids = continued
        self._turns.extend(following)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return sum(end - start for start, end in self._spans)

    def record(self) -> dict[str, Any]:
        """What is written to the partial file: the sample, whether its last answer was cut by a limit, and how many
        answers were never written because the conversation stopped.
        """
        return {
            "id": self.id,
            "ids": self.ids,
            "generated": self._spans,
            "turns": [[turn.role, turn.content] for turn in self._turns],
            "unfinished": self._unfinished,
            "dropped_turns": self._questions - len(self._spans),
        }


def recorded_row(record: Mapping[str, Any], original: Conversation, only_last_turn: bool = False) -> TokenRow:
    """The tokenized sample of a record: the mask covers what was generated (or its last turn) and nothing else."""
    mask = np.zeros(len(record["ids"]), dtype=np.bool_)
    for start, end in record["generated"][-1 if only_last_turn else 0 :]:
        mask[start:end] = True
    return TokenRow(original.id, np.array(record["ids"], dtype=np.int32), mask, original.columns)


def recorded_conversation(record: Mapping[str, Any], original: Conversation) -> Conversation:
    """The conversation of a record, under the id of the one it was made from."""
    return Conversation(original.id, tuple(Turn(*turn) for turn in record["turns"]), original.columns)


def _questions(turns: tuple[Turn, ...]) -> list[tuple[Turn, ...]]:
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
