"""Answers of a target turn by turn, as the exact tokens that it read and generated, and the interface of what answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

from draftworks.capture.engine import AskedPrompt, Generated, TargetEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn, digest_turns
from draftworks.data.slices import read_asked_thinking
from draftworks.data.tokenized import AnsweredSample, TokenRow, build_answered_rows
from draftworks.errors import DataError
from draftworks.storage.identity import digest


class Dialogue:
    """A conversation's token ids: prompt and generated ids of each turn, as a server and its clients exchange them.

    What the target reads for a turn is the template's rendering of the conversation so far, tokenized at once, with the
    words of earlier answers. Where it begins with the earlier prompt and the very ids that were generated, the answer
    joins them in one sample. Elsewhere (thoughts or blanks that the template drops, words that have other tokens when they
    are read) it begins a sample of its own. So every supervised token is one that the target generated, after the tokens
    that it read then. An assistant turn that opens the conversation is context; an assistant turn directly after another
    one is left out.

    Args:
        max_length: largest number of tokens of a sample.

    Attributes:
        chat: tokenizer and template that ask this conversation.
        refusal: why the target gives this dialogue no answer; None if it was not refused.

    Raises:
        DataError: no assistant turn to generate, the template refuses the conversation, or the prompt leaves no room.
    """

    def __init__(
        self, conversation: Conversation, chat: ChatTokenizer, max_length: int, continue_after_cut: bool = True
    ) -> None:
        self.id = conversation.id
        self.chat = chat
        self._max_length = max_length
        self._continue_after_cut = continue_after_cut
        self._questions = require_questions(conversation.turns)
        self._num_questions = len(self._questions)
        self._turns = list(self._questions.pop(0).turns)
        self.ids = chat.encode_prompt(self._turns)
        self._spans: list[tuple[int, int]] = []
        self._earlier_samples: list[dict[str, Any]] = []
        self._num_answers = 0
        self.num_generated = 0
        self._unfinished = 0
        self.done = False
        self.stop_reason: str | None = None
        self.refusal: str | None = None
        if len(self.ids) >= max_length:
            raise DataError(
                f"its prompt has {len(self.ids)} tokens, which leaves no room for a response within max_length "
                f"{max_length}"
            )

    def read_on_date(self, prompt_ids: Sequence[int], date: datetime) -> bool:
        """Ask this and all later turns as on another date, if the prompt then has these ids; return whether it has.

        For a template that prints today's date, asked by a server that knows which day it is.
        """
        chat = self.chat.on_date(date)
        if chat.encode_prompt(self._turns) != list(prompt_ids):
            return False
        self.chat = chat
        if self._spans:
            self._earlier_samples.append({"ids": self.ids[: self._spans[-1][1]], "generated": self._spans})
            self._spans = []
        self.ids = list(prompt_ids)
        return True

    @property
    def num_questions(self) -> int:
        """Number of answers that are asked for."""
        return self._num_questions

    @property
    def num_answers(self) -> int:
        return self._num_answers

    @property
    def num_cut(self) -> int:
        """Number of answers that a limit cut."""
        return self._unfinished

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the conversation so far."""
        return tuple(self._turns)

    def add(self, response: Generated) -> None:
        """Append a response to `ids`, then the prompt of the next response; set `done` if there is no next one.

        If the template refuses to go on after this response, `stop_reason` is its reason.
        """
        self._spans.append((len(self.ids), len(self.ids) + len(response.ids)))
        self._num_answers += 1
        self.num_generated += len(response.ids)
        self.ids = [*self.ids, *response.ids]
        self._turns.append(Turn("assistant", self.chat.decode(response.ids)))
        self._unfinished += not response.finished
        if not self._questions or not (response.finished or self._continue_after_cut):
            self.done = True
            return
        following = self._questions.pop(0).turns
        try:
            continued = self.chat.encode_prompt([*self._turns, *following])
        except DataError as error:
            self.done, self.stop_reason = True, str(error)
            return
        if len(continued) >= self._max_length:
            self.done = True
            return
        if continued[: len(self.ids)] != self.ids:
            self._earlier_samples.append(self._make_sample())
            self._spans = []
        self.ids = continued
        self._turns.extend(following)

    def _make_sample(self) -> dict[str, Any]:
        return {"ids": self.ids, "generated": self._spans}

    def to_record(self) -> dict[str, Any]:
        """Return the record for the file of finished answers.

        It has the last sample, how many answers were cut by a limit (`unfinished`), and how many were never generated because
        the conversation stopped (`dropped_turns`). `earlier` has the samples that end with earlier answers.
        """
        earlier = {"earlier": self._earlier_samples} if self._earlier_samples else {}
        return {
            "id": self.id,
            **self._make_sample(),
            **earlier,
            "turns": [list(astuple(turn)) for turn in self._turns],
            "unfinished": self._unfinished,
            "dropped_turns": self._num_questions - self._num_answers,
        }


def build_token_rows(record: Mapping[str, Any], original: Conversation, only_last_turn: bool = False) -> list[TokenRow]:
    """Return the tokenized samples of a record; the masks are true on the generated tokens (or the last turn's) only.

    With `only_last_turn` there is only the last sample. Answers of turns that the data excludes from training are not learnt.
    """
    trained = iter([question.answer.trained for question in require_questions(original.turns)])
    stored = [*record.get("earlier", []), {"ids": record["ids"], "generated": record["generated"]}]
    samples = [AnsweredSample(each["ids"], [span for span in each["generated"] if next(trained)]) for each in stored]
    if only_last_turn:
        learnt = [sample for sample in samples if sample.spans]
        samples = [AnsweredSample(sample.ids, sample.spans[-1:]) for sample in learnt[-1:]]
    return build_answered_rows(samples, original)


def build_conversation(record: Mapping[str, Any], original: Conversation) -> Conversation:
    """Return the conversation of a record, with the id and columns of the original one."""
    return Conversation(original.id, tuple(Turn(*turn) for turn in record["turns"]), original.columns)


def digest_questions(conversation: Conversation) -> str:
    """Return the digest of what a conversation asks: its questions, what of the answers is learnt, and whether they are asked
    with thinking.

    The id where it asks nothing, which is rejected under that id later.
    """
    try:
        questions = require_questions(conversation.turns)
    except DataError:
        return conversation.id
    asked = [[digest_turns(each.turns), each.answer.trained] for each in questions]
    return digest([asked, read_asked_thinking(conversation.columns)])


@dataclass(frozen=True)
class Question:
    """The turns before an answer, from the answer before it on, and the turn that the target answers instead."""

    turns: tuple[Turn, ...]
    answer: Turn


def require_questions(turns: tuple[Turn, ...]) -> list[Question]:
    """Return, for each assistant turn to generate, the turns between the previous one and it.

    Raises:
        DataError: no assistant turn is to be generated.
    """
    questions, pending, has_user_turn = [], [], False
    for turn in turns:
        if turn.role != "assistant":
            pending.append(turn)
            has_user_turn = has_user_turn or turn.role != "system"
        elif has_user_turn:
            questions.append(Question(tuple(pending), turn))
            pending, has_user_turn = [], False
        elif not questions:
            pending.append(turn)
    if not questions:
        raise DataError("it has no assistant turn after a user turn")
    return questions


@dataclass(frozen=True)
class DialogueAdvance:
    """What was done since the last one.

    Attributes:
        ended: dialogues that have all of their answers.
        read: tokens of prompts, if nothing else took time; else 0.
        made: tokens of answers, those of unfinished ones included.
    """

    ended: tuple[Dialogue, ...]
    read: int
    made: int


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

    def converse(self, dialogues: Sequence[Dialogue], batch_size: int) -> Iterator[DialogueAdvance]:
        """Generate all answers of these dialogues; yield as they are made. Raises CaptureError, EngineError as `answer`."""
        for start in range(0, len(dialogues), batch_size):
            batch = dialogues[start : start + batch_size]
            converse(self, batch)
            yield DialogueAdvance(tuple(batch), 0, sum(dialogue.num_generated for dialogue in batch))

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

    def converse(self, dialogues: Sequence[Dialogue], batch_size: int) -> Iterator[DialogueAdvance]:
        sampling = self._sampling.model_copy(update={"batch_size": batch_size})
        asked = {_ask(dialogue, 0): dialogue for dialogue in dialogues}
        waiting = deque(sorted(asked, key=lambda each: -len(each.prompt)))
        for advance in self._engine.answer_stream(waiting, sampling, self._max_length, self._end_ids):
            ended = []
            for answered in advance.answered:
                dialogue = asked.pop(answered.asked)
                dialogue.add(answered.answer)
                if dialogue.done:
                    ended.append(dialogue)
                else:  # the next turn, before conversations that have not begun
                    waiting.appendleft(_ask(dialogue, answered.asked.turn + 1))
                    asked[waiting[0]] = dialogue
            yield DialogueAdvance(tuple(ended), advance.read, advance.made)

    def close(self) -> None:
        self._engine.close()


def _ask(dialogue: Dialogue, turn: int) -> AskedPrompt:
    return AskedPrompt(dialogue.id, tuple(dialogue.ids), turn)


def converse(answerer: Answerer, dialogues: Sequence[Dialogue]) -> None:
    """Generate all answers of these dialogues, turn by turn. Raises CaptureError, EngineError as `Answerer.answer`."""
    turn, active = 0, list(dialogues)
    while active:
        for dialogue, response in zip(active, answerer.answer(active, turn), strict=True):
            dialogue.add(response)
        active = [dialogue for dialogue in active if not dialogue.done]
        turn += 1
