"""Where the producers of a stream get their samples from: tokens that exist, or answers that they generate first."""

from __future__ import annotations

import heapq
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftworks.capture.answers.dialogue import Dialogue, EngineAnswerer, build_token_rows, converse
from draftworks.capture.engine import TargetEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError, DataError
from draftworks.stream.metadata_store import PromptTask

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskLimits:
    """The most that one task may have, so that it fits below a watermark beside what a consumer still gathers.

    Attributes:
        bytes_per_token: of the features that are stored.
    """

    bytes_per_token: int = 0
    samples: int = 2**62
    bytes: int = 2**62


class RowSource(ABC):
    """Samples in tasks. Every producer of a run opens the same source, so that any of them can take any task.

    Attributes:
        calls_engine: whether `make_rows` calls the engine.
    """

    calls_engine: bool = False

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of samples, or of prompts, of which the share of failed ones is counted."""

    @abstractmethod
    def measure(self, samples: int) -> int:
        """Return the tokens that so many samples have at most, together."""

    @abstractmethod
    def list_tasks(self, run_id: str, limits: TaskLimits = TaskLimits()) -> Iterator[PromptTask]:
        """Yield the tasks in the order in which they are taken; their ids depend on the source and the limits only."""

    @abstractmethod
    def make_rows(self, task: PromptTask, engine: TargetEngine | None) -> list[TokenRow]:
        """Return the samples of a task, each with an id of its own in the run.

        Args:
            engine: None where the source does not call it.

        Raises:
            EngineError: the engine cannot go on. Samples that the target refuses are left out.
        """


class TokenSource(RowSource):
    """The samples of a tokenized set, in its order.

    Args:
        batch_tokens: tokens of a task at most, as the engine pads them to the longest; a longer sample has its own.
    """

    def __init__(self, rows: Sequence[TokenRow], batch_tokens: int) -> None:
        self._rows = rows
        self._batch_tokens = batch_tokens

    @property
    def size(self) -> int:
        return len(self._rows)

    def measure(self, samples: int) -> int:
        return sum(heapq.nlargest(samples, (len(row.input_ids) for row in self._rows)))

    def list_tasks(self, run_id: str, limits: TaskLimits = TaskLimits()) -> Iterator[PromptTask]:
        first, longest, tokens = 0, 0, 0
        for index, row in enumerate(self._rows):
            count, length = index - first + 1, len(row.input_ids)
            padded, nbytes = max(longest, length) * count, (tokens + length) * limits.bytes_per_token
            if count > 1 and (padded > self._batch_tokens or count > limits.samples or nbytes > limits.bytes):
                yield self._make_task(run_id, first, index, limits)
                first, longest, tokens = index, 0, 0
            longest, tokens = max(longest, length), tokens + length
        if first < len(self._rows):
            yield self._make_task(run_id, first, len(self._rows), limits)

    def make_rows(self, task: PromptTask, engine: TargetEngine | None) -> list[TokenRow]:
        return [self._rows[index] for index in range(task.metadata["first"], task.metadata["end"])]

    def _make_task(self, run_id: str, first: int, end: int, limits: TaskLimits) -> PromptTask:
        rows = [self._rows[index] for index in range(first, end)]
        tokens = sum(len(row.input_ids) for row in rows)
        return PromptTask(
            f"rows-{first}-{end}",
            run_id,
            tuple(row.sample_id for row in rows),
            step=first,
            num_tokens=tokens,
            metadata={"first": first, "end": end},
            size=(len(rows), tokens * limits.bytes_per_token),
        )


class ConversationSource(RowSource):
    """Conversations whose assistant turns the target answers anew; the answers are what is supervised.

    Generation and capture are one visit of a producer: an answer goes to the engine again at once, for its features.

    Args:
        responses: how answers are sampled, and how many conversations a task has (`batch_size`).
        max_length: largest number of tokens of a sample.
    """

    calls_engine = True

    def __init__(
        self,
        conversations: Sequence[Conversation],
        chat: ChatTokenizer,
        responses: ResponseSpec,
        max_length: int,
        only_last_turn: bool = False,
    ) -> None:
        self._conversations = conversations
        self._chat = chat
        self._responses = responses
        self._max_length = max_length
        self._only_last_turn = only_last_turn

    @property
    def size(self) -> int:
        return len(self._conversations)

    def measure(self, samples: int) -> int:
        return samples * self._max_length

    def list_tasks(self, run_id: str, limits: TaskLimits = TaskLimits()) -> Iterator[PromptTask]:
        """Yield tasks whose size is that of the longest answers; a conversation counts as one sample."""
        nbytes, count = self._max_length * limits.bytes_per_token, self._count_together(limits)
        for first in range(0, self.size, count):
            end = min(first + count, self.size)
            yield PromptTask(
                f"prompts-{first}-{end}",
                run_id,
                step=first,
                metadata={"first": first, "end": end},
                size=(end - first, (end - first) * nbytes),
            )

    def make_rows(self, task: PromptTask, engine: TargetEngine | None) -> list[TokenRow]:
        return self._answer(self._conversations[task.metadata["first"] : task.metadata["end"]], engine)

    def _count_together(self, limits: TaskLimits) -> int:
        """Return the conversations of a task at most."""
        nbytes = self._max_length * limits.bytes_per_token
        return max(1, min(self._responses.batch_size, limits.samples, limits.bytes // max(1, nbytes)))

    def _answer(self, chosen: Sequence[Conversation], engine: TargetEngine | None) -> list[TokenRow]:
        assert engine is not None, "the source calls it"
        answerer = EngineAnswerer(engine, self._responses, self._chat, self._max_length)
        begun = {each.id: dialogue for each in chosen if (dialogue := self._begin(each)) is not None}
        try:
            converse(answerer, list(begun.values()))
        except CaptureError:  # it does not say which dialogue the target refuses
            begun = {each.id: self._answer_alone(answerer, each) for each in chosen}
        rows: list[TokenRow] = []
        for each in chosen:
            dialogue = begun.get(each.id)
            if dialogue is not None:
                rows += build_token_rows(dialogue.to_record(), each, self._only_last_turn)
        return rows

    def _begin(self, conversation: Conversation) -> Dialogue | None:
        try:
            return Dialogue(
                conversation, self._chat.choose(conversation), self._max_length, self._responses.continue_after_cut
            )
        except DataError as error:
            log.warning("conversation %s has no answer: %s", conversation.id, error)
            return None

    def _answer_alone(self, answerer: EngineAnswerer, conversation: Conversation) -> Dialogue | None:
        dialogue = self._begin(conversation)
        if dialogue is None:
            return None
        try:
            converse(answerer, [dialogue])
        except CaptureError as error:
            log.warning("conversation %s has no answer: %s", conversation.id, error)
            return None
        return dialogue
