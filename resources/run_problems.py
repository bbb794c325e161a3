"""Collects the failures and interruptions of a run from its events, for the message at its end."""

from __future__ import annotations

from typing import Any

import dagster as dg

from draftworks.errors import DraftworksError

INTERRUPTED = dg.DagsterExecutionInterruptedError.__name__
CRASHED = "ChildProcessCrashException"  # Dagster's, where the process of a step ends without a result
MEANT_FOR_A_PERSON = {kind.__name__ for kind in (DraftworksError, *DraftworksError.__subclasses__())}
KEPT = "Finished results are kept. Run the same job again: it continues from there."


class RunProblems:
    """Failed steps, failed checks and interrupted steps of one run, in the order of their events."""

    def __init__(self) -> None:
        self._causes: dict[str, str] = {}
        self._interrupted: dict[str, str] = {}
        self._crashed: list[str] = []
        self._checks: dict[str, list[str]] = {}

    def note(self, event: dg.DagsterEvent) -> None:
        """Record one event of the run."""
        step = event.step_key or ""
        if event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR and check.blocking:
                self._checks.setdefault(step, []).append(f"check {check.check_name} failed: {describe_check(check)}")
        elif event.is_step_failure:
            data = event.step_failure_data
            if _is_interruption(data.error):
                self._interrupted[step] = read_interruption(data.error)
            elif data.error is not None and data.error.cls_name == CRASHED:
                self._crashed.append(step)
            else:
                self._causes[step] = "\n".join(self._checks.get(step, [])) or describe_cause(data)

    def describe_failure(self) -> str | None:
        """Return the first failure in full, with its step; None if no step failed."""
        if not self._causes:
            return None
        first, cause = next(iter(self._causes.items()))
        more = [step for step in self._causes if step != first]
        others = f"{len(self._causes)} steps failed, later than this one: {', '.join(more)}\n" if more else ""
        return f"{others}{first} failed: {cause}"

    def describe_interruption(self) -> str:
        """Return the saved progress of interrupted steps, and how to continue."""
        saved = [f"{step}: {words}." for step, words in self._interrupted.items() if words]
        return " ".join(["interrupted.", *saved, KEPT])

    def describe_crash(self) -> str:
        """Return which steps' processes ended without a result, and how to continue.

        A process that is stopped with its whole tree may end before its interruption is heard.
        """
        ended = [step for step in self._crashed if step not in self._interrupted]
        if not ended:
            return self.describe_failure() or self.describe_interruption()
        steps = ", ".join(ended)
        return f"the process of {steps} ended without a result: it was stopped or killed, or memory ran out. {KEPT}"


def describe_check(check: Any) -> str:
    """Return a check's description; if it has none, its metadata as text."""
    figures = ", ".join(f"{key}: {value.value}" for key, value in (check.metadata or {}).items())
    return check.description or figures


def describe_cause(failure: Any) -> str:
    """Return why a step failed, from its `StepFailureData`: the description of its dagster Failure, else the traceback.

    The innermost error is last, so that the last line names it.
    """
    description = getattr(failure.user_failure_data, "description", None)
    return description or describe_innermost(failure.error)


def describe_innermost(error: Any) -> str:
    """Return traceback and message of the innermost cause of a `SerializableErrorInfo`; of a DraftworksError the
    message alone."""
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return "no reason was given"
    if error.cls_name in MEANT_FOR_A_PERSON:
        return error.message.partition(f"{error.cls_name}: ")[2].rstrip() or error.message.rstrip()
    frames = "".join(error.stack)
    return f"{frames and f'Traceback (most recent call last):{chr(10)}{frames}'}{error.message}".rstrip()


def read_interruption(error: Any) -> str:
    """Return the message of an interrupted step, such as which training step is saved; empty if it has none."""
    _, _, words = error.message.strip().partition(f"{INTERRUPTED}: ")
    return words


def _is_interruption(error: Any) -> bool:
    return error is not None and error.cls_name in (INTERRUPTED, KeyboardInterrupt.__name__)
