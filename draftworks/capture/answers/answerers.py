"""Sources of answers: a target engine that receives token ids, or a server that receives messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftworks.capture.answers.dialogue import Dialogue
from draftworks.capture.engine import Generated, TargetEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.data.chat import ChatTokenizer


class Answerer(ABC):
    """Source of the next answer of each dialogue.

    Attributes:
        concurrent: whether `answer` may be called from several threads, which then raises its throughput.
        replicas: number of copies of the target that answer in parallel.
    """

    concurrent: bool
    replicas: int = 1

    @abstractmethod
    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        """Return the next answer of each dialogue, in the order of `dialogues`.

        Args:
            turn: number of answers that each dialogue has already.

        Raises:
            CaptureError: the target refuses a dialogue. A concurrent answerer is called with one dialogue, so the error
                is about that one.
            EngineError: the answerer cannot go on.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine or the connections; calls of `answer` that are still running fail."""


class EngineAnswerer(Answerer):
    """Answerer that generates with a target engine.

    Args:
        max_length: largest number of tokens of prompt and answer together.
    """

    def __init__(self, engine: TargetEngine, sampling: ResponseSpec, chat: ChatTokenizer, max_length: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._end_ids = chat.eos_ids
        self._max_length = max_length
        self.concurrent = engine.concurrent
        self.replicas = engine.replicas

    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        return self._engine.generate(
            [dialogue.ids for dialogue in dialogues],
            self._sampling,
            [dialogue.id for dialogue in dialogues],
            self._max_length,
            turn=turn,
            end_ids=self._end_ids,
        )

    def close(self) -> None:
        self._engine.close()


def converse(answerer: Answerer, dialogues: Sequence[Dialogue]) -> None:
    """Generate all answers of these dialogues, turn by turn. Raises CaptureError, EngineError as `Answerer.answer`."""
    turn, active = 0, list(dialogues)
    while active:
        for dialogue, response in zip(active, answerer.answer(active, turn), strict=True):
            dialogue.add(response)
        active = [dialogue for dialogue in active if not dialogue.done]
        turn += 1
