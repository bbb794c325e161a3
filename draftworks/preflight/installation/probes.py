"""Probes of an installation: run in parallel, each bounded in time, with what was found in lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftworks.errors import DraftworksError

State = Literal["ok", "warning", "problem"]
_CORRECT_FIRST = "correct that, then run draftworks doctor again: it looks at this area too"
_UNEXPECTED = "look whether this user may read what is named there; if so, please report this line"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        area: such as `disk` or `dagster`.
        todo: what to do about it; empty where there is nothing to do.
    """

    area: str
    state: State
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Probe:
    """A look at one area, which changes nothing but for files that it removes again."""

    area: str
    look: Callable[[], Iterable[Line]]


@dataclass
class _Outcome:
    lines: list[Line] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


def run_probes(probes: Sequence[Probe], limit_s: float) -> list[Line]:
    """Run all probes at once and return their lines, in the order of the probes.

    A probe that has not ended after `limit_s`, or that raises, is one warning: another machine may hang, and the other
    probes are of use all the same.
    """
    outcomes = [_Outcome() for _ in probes]
    for probe, outcome in zip(probes, outcomes):
        # A daemon: one that hangs in a system call does not keep the command from ending.
        threading.Thread(target=_run, args=(probe, outcome), name=f"probe {probe.area}", daemon=True).start()
    deadline = time.monotonic() + limit_s
    return [line for probe, outcome in zip(probes, outcomes) for line in _collect(probe, outcome, deadline, limit_s)]


def _run(probe: Probe, outcome: _Outcome) -> None:
    try:
        for line in probe.look():
            outcome.lines.append(line)
    except Exception as error:
        # An error of a registry file is a problem of its own line, and several probes run into it.
        is_known = isinstance(error, DraftworksError)
        reason = str(error).partition("\n")[0] if is_known else repr(error)
        todo = _CORRECT_FIRST if is_known else _UNEXPECTED
        outcome.lines.append(Line(probe.area, "warning", f"could not be looked at: {reason}", todo))
    outcome.ended.set()


def _collect(probe: Probe, outcome: _Outcome, deadline: float, limit_s: float) -> Iterator[Line]:
    in_time = outcome.ended.wait(max(0.0, deadline - time.monotonic()))
    yield from list(outcome.lines)
    if not in_time:
        todo = "look whether a disk, a network or a server hangs; run it again when the machine is less busy"
        yield Line(probe.area, "warning", f"no answer within {limit_s:.0f} s", todo)
