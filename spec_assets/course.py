"""The course of a run in the words a person needs at its end: what failed first and why, or what an interruption left."""

from __future__ import annotations

from typing import Any

import dagster as dg

from draftworks.errors import DraftworksError

INTERRUPTED = dg.DagsterExecutionInterruptedError.__name__
MEANT_FOR_A_PERSON = {kind.__name__ for kind in (DraftworksError, *DraftworksError.__subclasses__())}
KEPT = "What is finished is kept. Run the same job again: it goes on from there."


class Course:
    """What a run's events say of failures, in the order in which they came."""

    def __init__(self) -> None:
        self._causes: dict[str, str] = {}
        self._interrupted: dict[str, str] = {}
        self._checks: dict[str, list[str]] = {}

    def note(self, event: dg.DagsterEvent) -> None:
        """Take in one event of the run."""
        step = event.step_key or ""
        if event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR and check.blocking:
                self._checks.setdefault(step, []).append(f"check {check.check_name} failed: {described(check)}")
        elif event.is_step_failure:
            data = event.step_failure_data
            if _is_interruption(data.error):
                self._interrupted[step] = said_of_interruption(data.error)
            else:
                self._causes[step] = "\n".join(self._checks.get(step, [])) or cause_of(data)

    def why_failed(self) -> str | None:
        """The first cause, whole, with its step's name; None where no step failed."""
        if not self._causes:
            return None
        first, cause = next(iter(self._causes.items()))
        more = [step for step in self._causes if step != first]
        others = f"{len(self._causes)} steps failed, later than this one: {', '.join(more)}\n" if more else ""
        return f"{others}{first} failed: {cause}"

    def what_is_left(self) -> str:
        """After an interruption: what the steps that were at work have saved, and how to go on."""
        said = [f"{step}: {words}." for step, words in self._interrupted.items() if words]
        return " ".join(["interrupted.", *said, KEPT])


def described(check: Any) -> str:
    """A check's description, or its figures where it has none."""
    figures = ", ".join(f"{key}: {value.value}" for key, value in (check.metadata or {}).items())
    return check.description or figures


def cause_of(failure: Any) -> str:
    """Why a step failed, from its `StepFailureData`: our own description where there is one, else the traceback.

    The innermost error comes last, so that the last line says what it was.
    """
    told = getattr(failure.user_failure_data, "description", None)
    return told or innermost(failure.error)


def innermost(error: Any) -> str:
    """The traceback and message of the error that began it, from Dagster's `SerializableErrorInfo`; the message alone of what
    is meant for a person."""
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return "no reason was given"
    if error.cls_name in MEANT_FOR_A_PERSON:
        return error.message.partition(f"{error.cls_name}: ")[2].rstrip() or error.message.rstrip()
    frames = "".join(error.stack)
    return f"{frames and f'Traceback (most recent call last):{chr(10)}{frames}'}{error.message}".rstrip()


def said_of_interruption(error: Any) -> str:
    """What the interrupted step said for itself; empty if it had nothing to say."""
    _, _, words = error.message.strip().partition(f"{INTERRUPTED}: ")
    return words


def _is_interruption(error: Any) -> bool:
    return error is not None and error.cls_name in (INTERRUPTED, KeyboardInterrupt.__name__)
