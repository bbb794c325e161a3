"""Sources of answers: a target engine that receives token ids, or a server that receives messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftworks.capture.answers.dialogue import Dialogue
from draftworks.capture.engine import Generated, TargetEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.data.chat import ChatTokenizer


class Answerer(ABC):
    """Gives each dialogue its next answer.

    Attributes:
        concurrent: whether `answer` may be called from several threads, and answers more in the same time if it is.
        replicas: copies of the target that answer side by side.
    """

    concurrent: bool
    replicas: int = 1

    @abstractmethod
    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        """The next answer of each dialogue, in their order; `turn` counts those before it.

        Raises:
            CaptureError: the target refuses; of a concurrent answerer it is about the one dialogue it was given.
            EngineError: it cannot go on.
        """

    @abstractmethod
    def close(self) -> None:
        """End what it runs; answers that are still awaited fail."""


class EngineAnswerer(Answerer):
    """Answers by a target engine.

    Args:
        max_length: most tokens of prompt and answer.
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
