"""One reading of a server's counters of speculative decoding, and what every kind of server has in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from draftworks.errors import EngineError
from draftworks.storage.words import list_names

PASSES, ACCEPTED, PROPOSED = "passes", "accepted", "proposed"
TOKENS, REQUESTS = "tokens", "requests"
POSITION = "position_"


@dataclass(frozen=True)
class Scrape:
    """What one server said.

    Attributes:
        version: of the server's software; None if it does not say.
        instance: changes with the server's process; None if nothing of it does.
        started: when the process started, in seconds since the epoch; None if it does not say.
        draft: the draft's path as the server was given it; None if the server does not say.
        counters: since the start of the process. `passes` with `accepted` and `proposed`, or with `tokens` and `requests`.
            Empty where the server only has a gauge.
        gauge: tokens per pass lately, the target's own included, by a gauge; None if there is none, or no pass.
        remarks: what a reader of the figures has to know.
    """

    version: str | None
    instance: str | None
    started: float | None
    draft: str | None
    counters: Mapping[str, int]
    gauge: float | None = None
    remarks: tuple[str, ...] = field(default=())


def count_accepted(counts: Mapping[str, int]) -> int:
    """Return the accepted tokens in a difference of counters.

    A server that counts tokens and not accepted ones gave of each request one token in the prefill, and of each pass one of
    the target's own. An answer that ends with an accepted token therefore counts one too few.
    """
    if ACCEPTED in counts:
        return counts[ACCEPTED]
    return max(counts[TOKENS] - counts[REQUESTS] - counts[PASSES], 0)


def list_positions(counts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return draft positions with their accepted tokens, in order; empty where the server does not count them."""
    found = [(int(name.removeprefix(POSITION)), n) for name, n in counts.items() if name.startswith(POSITION)]
    return sorted(found)


def require_model(found: Sequence[str | None], expected: Collection[str]) -> None:
    """Raise EngineError unless one of the names that a server gives its model is an expected one."""
    names = [name.rstrip("/") for name in found if name]
    if not names:
        raise EngineError("the server does not say which model it serves")
    if not {name.rstrip("/") for name in expected} & set(names):
        raise EngineError(
            f"serves another model: expected {' or '.join(sorted(expected))}, found {', '.join(dict.fromkeys(names))}. "
            "Nothing is recorded. If it is the target under another name, give that name as `model` of the server"
        )


def require_one_model(labels: Sequence[str]) -> None:
    """Raise EngineError if the counters of a scrape are of several models."""
    if len(labels) > 1:
        raise EngineError(
            f"has counters of several models ({list_names(labels)}): is it a router? Give the address of one server"
        )
