"""People's answers to decisions, and targets on hold, with who, when and why; their log. Torch-free.

{var}/decisions/people.jsonl   one event a line, see `draftworks.decision.answers`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from draftworks.decision.record import FOLDER, Choice, Decision, find_decision
from draftworks.errors import StoreError
from draftworks.storage.event_log import EventLog

Event = TypeVar("Event")


def open_log(path: Path, adapter: TypeAdapter[Event], purpose: str) -> EventLog[Event]:
    """Return the log of a file whose events are frozen dataclasses that `adapter` validates."""

    def parse(line: bytes) -> Event:
        try:
            return adapter.validate_json(line, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(": ".join(filter(None, (".".join(map(str, wrong["loc"])), wrong["msg"])))) from None

    return EventLog(path, parse, lambda event: json.dumps(adapter.dump_python(event)).encode(), purpose)


FILE = "people.jsonl"
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Answer:
    """The choice of a person for one subject of a decision.

    Attributes:
        subject: of the decision; another subject is another question.
        at: seconds since the epoch.
    """

    target: Text
    strategy: Text
    subject: Text
    choice: Literal[Choice.KEEP, Choice.TUNE, Choice.RETRAIN]
    who: Text
    why: Annotated[str, Field(max_length=10_000)]
    at: Seconds
    kind: Literal["answer"] = "answer"
    schema: Literal[1] = 1

    def describe(self) -> str:
        """Return who, when and why in words."""
        return _describe_answer(self.who, self.at, self.why)


@dataclass(frozen=True)
class Hold:
    """A target for which nothing is started, or, with `held` false, the end of that."""

    target: Text
    held: bool
    who: Text
    why: Annotated[str, Field(max_length=10_000)]
    at: Seconds
    kind: Literal["hold"] = "hold"
    schema: Literal[1] = 1

    def describe(self) -> str:
        """Return who, when and why in words."""
        return _describe_answer(self.who, self.at, self.why)


_ADAPTER: TypeAdapter[Answer | Hold] = TypeAdapter(Annotated[Answer | Hold, Field(discriminator="kind")])


@dataclass(frozen=True)
class Answers:
    """The newest answer for each target and strategy, and the targets on hold.

    Attributes:
        given: by target and strategy.
        holds: by target.
    """

    given: Mapping[tuple[str, str], Answer] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Answer | Hold]) -> Answers:
        given: dict[tuple[str, str], Answer] = {}
        holds: dict[str, Hold] = {}
        for event in events:
            if isinstance(event, Answer):
                given[event.target, event.strategy] = event
            elif event.held:
                holds[event.target] = event
            else:
                holds.pop(event.target, None)
        return cls(given, holds)

    def find(self, decision: Decision) -> Answer | None:
        """Return the answer to a decision; one to another subject does not count."""
        found = self.given.get((decision.target, decision.strategy))
        return found if found is not None and found.subject == decision.subject else None


@dataclass(frozen=True)
class AnswerFile:
    """The answers of a deployment, shared by processes and hosts."""

    var: Path

    @property
    def path(self) -> Path:
        return self.var / FOLDER / FILE

    def read(self) -> Answers:
        """Return all answers. Raises StoreError if the file is damaged."""
        return Answers.of(self._log.read())

    def read_events(self) -> tuple[Answer | Hold, ...]:
        """Return everything that people said, oldest first. Raises StoreError if the file is damaged."""
        return tuple(self._log.read())

    def accept(self, target: str, strategy: str, choice: Choice | None, who: str, why: str, now: float) -> Answer:
        """Record a person's answer to the newest decision; without `choice` the decision's own.

        Raises:
            StoreError: there is no decision, or it is `undecided` and no choice is given. Nothing is changed.
        """
        made: list[Answer] = []

        def make(_: Sequence[Answer | Hold]) -> list[Answer]:
            decision = find_decision(self.var, target, strategy)  # the newest one at the moment of the answer
            if decision is None:
                raise StoreError(
                    f"target {target}, {strategy}: there is no decision to answer. Run draftworks decide {target} {strategy}"
                )
            chosen = decision.choice if choice is None else choice
            if chosen is Choice.UNDECIDED:
                raise StoreError(
                    f"target {target}, {strategy}: the decision is undecided: say what you choose with --choice keep, tune "
                    "or retrain"
                )
            made.append(Answer(target, strategy, decision.subject, chosen, who, why, now))
            return made

        self._log.append(make)
        return made[0]

    def hold(self, target: str, who: str, why: str, now: float) -> Hold:
        """Put a target on hold, and return its hold; an earlier hold stays."""
        made = Hold(target, True, who, why, now)
        self._log.append(lambda events: [] if target in Answers.of(events).holds else [made])
        return self.read().holds.get(target, made)

    def release(self, target: str, who: str, why: str, now: float) -> None:
        """End a hold. Raises StoreError if the target is not on hold."""

        def make(events: Sequence[Answer | Hold]) -> list[Hold]:
            if target not in Answers.of(events).holds:
                raise StoreError(f"target {target} is not on hold by draftworks hold")
            return [Hold(target, False, who, why, now)]

        self._log.append(make)

    @property
    def _log(self) -> EventLog[Answer | Hold]:
        return open_log(self.path, _ADAPTER, "a list of people's answers")


def _describe_answer(who: str, at: float, why: str) -> str:
    return f"by {who} at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" + (f": {why}" if why else "")
