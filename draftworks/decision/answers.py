"""What people say to decisions: answers, and targets on hold, with who, when and why; the log that keeps it. Torch-free.

{var}/decisions/people.jsonl   one event a line, see `draftworks.decision.answers`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from draftworks.decision.record import FOLDER, Choice, Decision, find_decision
from draftworks.errors import StoreError
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import fsync, read_bytes

MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 16

Event = TypeVar("Event")


@dataclass(frozen=True)
class EventLog(Generic[Event]):
    """The events of one file.

    Attributes:
        adapter: validates one event, a frozen dataclass.
        purpose: what the file is, for messages.
    """

    path: Path
    adapter: TypeAdapter[Event]
    purpose: str

    def read(self) -> tuple[Event, ...]:
        """Return all events, oldest first; none without a file.

        Raises:
            StoreError: the file cannot be read, or a whole line of it is no valid event.
        """
        return self._parse(self._read_whole_lines())

    def append(self, make: Callable[[tuple[Event, ...]], Sequence[Event]]) -> tuple[Event, ...]:
        """Append what `make` returns for the events so far, and return it. No other process writes meanwhile.

        An error of `make` leaves the file as it is. A process that is killed here has appended some first ones of the
        events, each of them whole.

        Raises:
            StoreError: the file is damaged, or this process lost the lease.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        busy = f"{self.path} is being written by another process: waiting"
        with hold_lock(self.path.with_name(f".{self.path.name}.lock"), busy) as lease:
            content = self._read_whole_lines()
            added = tuple(make(self._parse(content)))
            if added:
                lease.confirm()
                self._write(added, len(content))
            return added

    def _read_whole_lines(self) -> bytes:
        try:
            content = read_bytes(self.path, MAX_BYTES)
        except FileNotFoundError:
            return b""
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path}: cannot be read as {self.purpose}: {error}") from None
        return content[: content.rfind(b"\n") + 1]

    def _parse(self, content: bytes) -> tuple[Event, ...]:
        found = []
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
                found.append(self.adapter.validate_json(line, strict=True))
            except ValueError as error:
                raise StoreError(
                    f"{self.path}: line {number} is not one of {self.purpose}: {_describe(error)}. Nothing is changed: "
                    "restore the file from a backup, or remove the line"
                ) from None
        return tuple(found)

    def _write(self, events: Sequence[Event], whole: int) -> None:
        content = b"".join(json.dumps(_to_json(event)).encode() + b"\n" for event in events)
        is_new = not self.path.exists()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(handle).st_size > whole:
                os.ftruncate(handle, whole)
            while content:
                content = content[os.write(handle, content) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        if is_new:
            fsync(self.path.parent)


def _to_json(event: Any) -> dict[str, Any]:
    return asdict(event)


def _describe(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    wrong = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, wrong["loc"])), wrong["msg"])))


FILE = "people.jsonl"
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Answer:
    """What a person chose for one subject of a decision.

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
        return self._log.read()

    def accept(self, target: str, strategy: str, choice: Choice | None, who: str, why: str, now: float) -> Answer:
        """Record a person's answer to the newest decision; without `choice` the decision's own.

        Raises:
            StoreError: there is no decision, or it is `undecided` and no choice is given. Nothing is changed.
        """
        made: list[Answer] = []

        def make(_: tuple[Answer | Hold, ...]) -> list[Answer]:
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
        """Put a target on hold; one that is already stays as it is. Returns the hold that is then there."""
        made = Hold(target, True, who, why, now)
        self._log.append(lambda events: [] if target in Answers.of(events).holds else [made])
        return self.read().holds.get(target, made)

    def release(self, target: str, who: str, why: str, now: float) -> None:
        """End a hold. Raises StoreError if the target is not on hold."""

        def make(events: tuple[Answer | Hold, ...]) -> list[Hold]:
            if target not in Answers.of(events).holds:
                raise StoreError(f"target {target} is not on hold by draftworks hold")
            return [Hold(target, False, who, why, now)]

        self._log.append(make)

    @property
    def _log(self) -> EventLog[Answer | Hold]:
        return EventLog(self.path, _ADAPTER, "a list of people's answers")


def _describe_answer(who: str, at: float, why: str) -> str:
    return f"by {who} at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" + (f": {why}" if why else "")
