"""Batches that an engine has been asked for and whose features are not stored yet, within a budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from draftworks.capture.engine import TargetEngine
from draftworks.capture.plan import StreamPlan
from draftworks.config.capture import CaptureSpec

DEFAULT_BATCHES = 4
"""Batches in flight where `capture.in_flight_tokens` is not set."""

Work = TypeVar("Work")


@dataclass(frozen=True)
class RequestSize:
    """Tokens of a batch, and the bytes of its hidden states."""

    tokens: int
    nbytes: int

    @classmethod
    def of(cls, tokens: int, streams: StreamPlan, capture: CaptureSpec) -> RequestSize:
        itemsize = getattr(torch, capture.compute_dtype).itemsize
        return cls(tokens, tokens * len(streams.streams) * streams.hidden_size * itemsize)


@dataclass(frozen=True)
class InFlightBudget:
    """The most that is in flight, but for one batch, which is always allowed. `batches` None is no limit."""

    tokens: int
    nbytes: int
    batches: int | None = None

    @classmethod
    def of(cls, capture: CaptureSpec, engine: TargetEngine) -> InFlightBudget:
        """Return the budget of the settings, further limited by what the engine can take."""
        tokens = capture.in_flight_tokens or DEFAULT_BATCHES * capture.batch_tokens
        nbytes = capture.in_flight_mb << 20
        room = engine.bytes_in_flight_limit
        return cls(tokens, nbytes if room is None else min(nbytes, room), engine.batches_in_flight_limit)


class InFlight(Generic[Work]):
    """A queue of work in flight, oldest first. Each counts until it is dropped, thus until its features are stored."""

    def __init__(self, budget: InFlightBudget) -> None:
        self._budget = budget
        self._entries: deque[tuple[Work, RequestSize]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def limit(self, budget: InFlightBudget) -> None:
        """Set the budget, once the engine is known."""
        self._budget = budget

    def fits(self, size: RequestSize) -> bool:
        """Return whether work of this size may begin now."""
        budget, sizes = self._budget, [each for _, each in self._entries]
        return not sizes or (
            sum(each.tokens for each in sizes) + size.tokens <= budget.tokens
            and sum(each.nbytes for each in sizes) + size.nbytes <= budget.nbytes
            and (budget.batches is None or len(sizes) < budget.batches)
        )

    def add(self, work: Work, size: RequestSize) -> None:
        self._entries.append((work, size))

    @property
    def oldest(self) -> Work:
        return self._entries[0][0]

    def drop_oldest(self) -> None:
        self._entries.popleft()

    def list_work(self) -> list[Work]:
        return [work for work, _ in self._entries]
