"""Hidden states of a request as an engine hands them over, and the two ends of a way to do so. Needs torch only."""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftworks.errors import PassingTroubleError

_PREFIX = "draftworks-"
_WITH_LOGITS = f"{_PREFIX}logits-"
_MADE = re.compile(rf"{_PREFIX}(?:logits-)?([0-9a-f]{{16}})-")


def make_request_id(with_logits: bool = False) -> str:
    """Return an id that makes the engine write this request's states, and its next-token logits if `with_logits`.

    It has the time, so that whoever finds parts of it knows how old they are.
    """
    return f"{_WITH_LOGITS if with_logits else _PREFIX}{time.time_ns():016x}-{uuid.uuid4().hex}"


def read_request_time(request_id: str) -> float | None:
    """Return when `make_request_id` made an id, or what begins with it, in seconds since the epoch; None for others."""
    match = _MADE.match(request_id)
    return int(match[1], 16) / 1e9 if match else None


def is_captured(request_id: str) -> bool:
    """Return whether a request's states are to be written; those of health checks and other clients are not."""
    return request_id.startswith(_PREFIX)


def wants_logits(request_id: str) -> bool:
    return request_id.startswith(_WITH_LOGITS)


@dataclass(frozen=True)
class Part:
    """One forward pass over `T` consecutive tokens of a request. A sound capture is one part that begins at 0.

    Attributes:
        start: number of tokens before these, which came from a cache or from an earlier pass.
        input_ids: (T,), int64.
        taps: (k, T, H), the tapped streams in ascending order.
        last: (T, H), after the final norm.
        logits: (V,), for the token after the last one, as the engine samples from them; None if not requested.
    """

    start: int
    input_ids: Tensor
    taps: Tensor
    last: Tensor
    logits: Tensor | None = None

    @classmethod
    def from_tensors(cls, start: int, tensors: dict[str, Tensor]) -> Part:
        return cls(start, tensors["input_ids"], tensors["taps"], tensors["last"], tensors.get("logits"))

    def list_tensors(self) -> dict[str, Tensor]:
        tensors = {"input_ids": self.input_ids, "taps": self.taps, "last": self.last}
        return tensors if self.logits is None else {**tensors, "logits": self.logits}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.list_tensors().values())


@dataclass(frozen=True)
class AnsweredRequest:
    """A request that the server has answered. Its part may still be on its way.

    Attributes:
        cached_tokens: as the server reported: where the first part begins.
    """

    request_id: str
    cached_tokens: int = 0


class PartSink(ABC):
    """The engine's end. A part is announced before the server answers, and may be written after that."""

    @abstractmethod
    def announce(self, request_id: str, start: int) -> None:
        """Let the reader know that a part will follow, or a failure."""

    @abstractmethod
    def write(self, request_id: str, part: Part) -> None:
        """Publish an announced part, of contiguous tensors in main memory, complete or not at all."""

    @abstractmethod
    def fail(self, request_id: str, reason: str) -> None:
        """Publish the reason why a part does not come."""


class PartSource(ABC):
    """The reader's end."""

    @abstractmethod
    def take(
        self, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> list[list[Part]]:
        """Wait for the parts of answered requests, return them in the order of their tokens, and remove them.

        A request of which no part was announced has none.

        Args:
            timeout_s: seconds to wait for what was announced.
            look: called about once a second meanwhile; raises if the engine is gone.

        Raises:
            PassingTroubleError: the engine failed to write a part, as on a full disk; it did not come in time, or is
                damaged.
            UnsoundEngineError: a part is of another schema.
        """

    @abstractmethod
    def measure_room(self) -> int:
        """Return the bytes of parts that one reader may have on their way."""

    @abstractmethod
    def discard(self, request_ids: Iterable[str]) -> None:
        """Remove everything of these requests, also what is still being written."""


def make_late_error(request_id: str, timeout_s: float) -> PassingTroubleError:
    return PassingTroubleError(
        f"SGLang answered request {request_id}, and its hidden states have not come for {timeout_s:g} s. Look at its "
        "log, and at the disk or store that they go through"
    )
