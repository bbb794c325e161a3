"""What an experiment tracker is told of a training, and the calls that each adapter has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Outcome(StrEnum):
    """How a session of a training ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class TrackedRun:
    """A training as trackers show it.

    Attributes:
        id: the same in every session of the training; letters, digits and hyphens.
        name: for people: target, strategy, draft.
        parameters: options and digests that decide the draft, flat, by dotted name. No text of the data.
        tags: target, strategy and draft.
        folder: for files that a tracker keeps beside the draft.
    """

    id: str
    name: str
    parameters: Mapping[str, str | int | float | bool]
    tags: Mapping[str, str]
    folder: Path


class Tracker(Protocol):
    """A run that is open in a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of an optimizer step."""

    def close(self, outcome: Outcome) -> None:
        """Send what is left, and mark how the session ended."""


def flatten_parameters(values: Mapping[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return nested options flat, by dotted name; what is None is left out, and lists are joined by commas."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten_parameters(value, f"{prefix}{name}."))
        elif isinstance(value, (str, int, float, bool)):
            flat[f"{prefix}{name}"] = value
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ",".join(map(str, value))
    return flat
