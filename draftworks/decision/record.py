"""The record of a decision, `decision.json`, and people's answers and holds, with who, when and why. Torch-free.

{var}/decisions/{target}/{strategy}/decision.json     the newest decision
{var}/decisions/{target}/{strategy}/history/, .lock/  see `draftworks.storage.event_log.NumberedRecord`
{var}/decisions/people.jsonl                          answers and holds, one event a line, see `open_log`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.event_log import EventLog, NumberedRecord
from draftworks.storage.names import require_name

SCHEMA_VERSION = 1
FOLDER, RECORD = "decisions", "decision.json"


class Choice(StrEnum):
    """The choice for the draft in service; see `draftworks.decision.rule` for their order."""

    KEEP = "keep"
    TUNE = "tune"
    """Go on training the draft in service, with the present data."""
    RETRAIN = "retrain"
    """Train a draft from the start."""
    UNDECIDED = "undecided"


class Reference(StrEnum):
    """The reference of the draft in service on an eval set."""

    SAME_PROMPTS = "same_prompts"
    """The figures with which the reference draft was put into service, on the same prompts; paired."""
    BOTH_DRAFTS = "both_drafts"
    """The reference draft measured on the new data; paired."""
    FORMER_FIGURE = "former_figure"
    """The figure with which it was put into service, on other prompts; not paired."""
    FIRST_HOURS = "first_hours"
    """What logged requests accepted in the first hours of the draft in service; not paired."""
    NONE = "none"


UNPAIRED = (Reference.FORMER_FIGURE, Reference.FIRST_HOURS)
"""References of which the number of prompts or requests counts too."""


Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Hours = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class EvalLoss:
    """Loss and choice of the rule on one eval set.

    Attributes:
        value: accepted tokens per pass of the draft in service now; `reference_value` is what it is compared with.
        loss: `reference_value` minus `value`; `low` and `high` are its 95% interval. None without a reference.
        prompts: shared prompts, or prompts of the new measurement for a former figure, of which there are
            `reference_prompts`.
        reference_draft: digest of the draft that `reference_value` is of.
        needed: prompts that would decide, if the loss stays; None where it is decided, or more would not decide.
        reason: in words, where the numbers do not say why.
    """

    eval_set: str
    choice: Choice
    reference: Reference
    reference_draft: str | None = None
    value: Number | None = None
    reference_value: Number | None = None
    loss: Number | None = None
    low: Number | None = None
    high: Number | None = None
    prompts: Count = 0
    reference_prompts: Count = 0
    needed: Count | None = None
    reason: str = ""


@dataclass(frozen=True)
class Margins:
    """Settings of the rule when it decided, in accepted tokens per pass; see `draftworks.config.operations`."""

    tune: Number
    retrain: Number
    least_prompts: Count


@dataclass(frozen=True)
class Costs:
    """GPU-hours that a tune or a training from the start has taken before for this target; None: not known."""

    tune: Hours | None = None
    retrain: Hours | None = None


@dataclass(frozen=True)
class Decision:
    """A decision about the draft in service of a target.

    Attributes:
        draft: digest of the draft in service.
        target_digest: digest of the target's weights.
        subject: digest of all that was decided about: equal facts give an equal decision, which is told once.
        figures: of each eval set, `heldout` first.
        reasons: in words, one for each eval set and one for each special case.
        after_tune: digest of the tune that did not help, for the choice `retrain` that comes of it.
        when: ISO 8601 with time zone.
        number: 1 for the first decision of a target and strategy; given by `save_decision`.
    """

    target: str
    strategy: str
    choice: Choice
    draft: str
    target_digest: str
    subject: str
    figures: tuple[EvalLoss, ...]
    reasons: tuple[str, ...]
    margins: Margins
    costs: Costs
    after_tune: str | None
    when: str
    number: Count = 0
    __pydantic_config__ = ConfigDict(extra="forbid")
    schema: int = field(default=SCHEMA_VERSION)

    @property
    def largest_loss(self) -> float:
        """The largest loss of any eval set; 0 without a figure."""
        return max((one.loss for one in self.figures if one.loss is not None), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, values: Any, where: str) -> Decision:
        """Return the decision in a file's JSON. Raises StoreError if it is no valid one."""
        try:
            if not isinstance(values, Mapping):
                raise StoreError(f"{where}: not a decision: expected a mapping, found {type(values).__name__}")
            if values.get("schema") != SCHEMA_VERSION:
                raise StoreError(f"{where}: expected schema {SCHEMA_VERSION}, found {values.get('schema')!r:.50}")
            found = _ADAPTER.validate_json(json.dumps(values), strict=True)
            for name in (found.target, found.strategy, found.draft, *filter(None, [found.after_tune])):
                require_name(name)
            if datetime.fromisoformat(found.when).tzinfo is None:
                raise ValueError(f"when: {found.when!r} has no time zone")
            if not found.number:
                raise ValueError("number: expected 1 or more, found 0")
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"]))
            raise StoreError(f"{where}: not a decision: {key}: {wrong['msg']}") from None
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"{where}: not a decision: {error}") from None
        return found


_ADAPTER = TypeAdapter(Decision)


def save_decision(var: Path, decision: Decision) -> Decision:
    """Write a decision as the newest one, and return the newest decision.

    With the subject and the choice of the newest one nothing is written, so that it keeps its number and its time.

    Raises:
        StoreError: the newest decision is damaged, or of another target.
    """

    def make(newest: Decision | None) -> Decision | None:
        if newest is not None and (newest.subject, newest.choice) == (decision.subject, decision.choice):
            return None
        return replace(decision, number=1 if newest is None else newest.number + 1)

    busy = f"the decision of {decision.target}, {decision.strategy} is being written by another process: waiting"
    found = _open_record(var, decision.target, decision.strategy).replace(make, busy)
    assert found is not None
    return found


def find_decision(var: Path, target: str, strategy: str) -> Decision | None:
    """Return the newest decision, by one read; None if there is none.

    Raises:
        StoreError: the file is damaged, or of another target.
    """
    return _open_record(var, target, strategy).find()


def read_decision_history(var: Path, target: str, strategy: str) -> list[Decision]:
    """Return every decision of a target and strategy, oldest first, the newest last."""
    return list(_open_record(var, target, strategy).read_history())


def _open_record(var: Path, target: str, strategy: str) -> NumberedRecord[Decision]:
    def parse(values: Any, where: str) -> Decision:
        found = Decision.from_json(values, where)
        if (found.target, found.strategy) != (target, strategy):
            raise StoreError(
                f"{where}: expected a decision about {target}, {strategy}, found one about {found.target}, "
                f"{found.strategy}: was the file copied? Remove it: it is decided again"
            )
        return found

    folder = var / FOLDER / require_name(target) / require_name(strategy)
    return NumberedRecord(folder, RECORD, parse, "a decision", "Remove the file: it is decided again")


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


_EVENT_ADAPTER: TypeAdapter[Answer | Hold] = TypeAdapter(Annotated[Answer | Hold, Field(discriminator="kind")])


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
        return open_log(self.path, _EVENT_ADAPTER, "a list of people's answers")


def _describe_answer(who: str, at: float, why: str) -> str:
    return f"by {who} at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" + (f": {why}" if why else "")
