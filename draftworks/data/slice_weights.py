"""Weights of slices: which conversations of a data mix are taken more often, and the file that holds them.

The plan is a file that a person (or a scheduled command) writes and the next training reads: the asset graph has no way
back from a report to its own data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.data.split import hash_fraction
from draftworks.errors import ConfigError
from draftworks.storage.atomic import publish_json
from draftworks.storage.identity import digest
from draftworks.storage.regular_files import read_json

if TYPE_CHECKING:
    from draftworks.data.conversations import Conversation  # it imports pyarrow

SCHEMA = 1
WEIGHTS_FILE = "weights.json"
"""In a set of conversations that was chosen by weights: the plan."""
MAX_FILE_BYTES = 1 << 20
LARGEST_WEIGHT = 10.0
DEFAULT_MAX_WEIGHT = 3.0
GAIN = 10.0
"""Weight over 1 for each unit of relative loss: a slice that accepts 10% less counts double."""


@dataclass(frozen=True)
class SliceWeight:
    """How often conversations of a slice are taken, compared with one of no fallen slice.

    Attributes:
        column, value: the slice.
        before, after: accepted tokens per pass that it had at promotion, and has now.
    """

    column: str
    value: str
    weight: float
    before: float
    after: float


@dataclass(frozen=True)
class SlicePlan:
    """Weights of the slices that fell.

    Attributes:
        eval_set: eval set on which they fell.
        report, reference: names of the reports with the figures now, and with those at promotion.
    """

    target: str
    strategy: str
    eval_set: str
    report: str
    reference: str
    max_weight: float
    weights: tuple[SliceWeight, ...]

    @property
    def identity(self) -> str:
        """Digest of what decides a selection: slices and weights, not the figures they come from."""
        return digest(sorted([one.column, one.value, one.weight] for one in self.weights))

    def weigh(self, columns: Mapping[str, Any]) -> float:
        """Return the weight of a conversation: the largest of its slices' weights, 1 outside of them."""
        found = (one.weight for one in self.weights if str(columns.get(one.column)) == one.value)
        return max(found, default=1.0)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "weights": [asdict(one) for one in self.weights]}


def compute_weight(before: float, after: float, max_weight: float = DEFAULT_MAX_WEIGHT) -> float:
    """Return the weight of a slice that fell: 1 + 10 x relative loss, at least 1, at most `max_weight`, two decimals.

    Raises:
        ConfigError: `max_weight` is not between 1 and 10.
    """
    if not 1 <= max_weight <= LARGEST_WEIGHT:
        raise ConfigError(f"max_weight: expected 1 to {LARGEST_WEIGHT:g}, found {max_weight:g}")
    if before <= 0 or after >= before:
        return 1.0
    return round(min(max_weight, 1.0 + GAIN * (before - after) / before), 2)


def select_weighted(
    conversations: Iterable[Conversation], count: int | None, plan: SlicePlan | None
) -> list[Conversation]:
    """Return `count` conversations, chosen by hash, one of weight w about w times as often as one of weight 1.

    Sampling without replacement by the smallest -ln(1 - u) / w (Efraimidis and Spirakis 2006), u from the id: the order of
    the data does not matter, an added conversation replaces at most one other, and with equal weights the choice is that of
    `conversations.select`.
    """

    def order(one: Conversation) -> tuple[float, str]:
        drawn = hash_fraction(one.id, "select")
        if plan is None or not plan.weights:
            return drawn, one.id
        return -math.log1p(-drawn) / plan.weigh(one.columns), one.id

    return sorted(conversations, key=order)[:count]


def save_plan(path: Path, plan: SlicePlan) -> None:
    """Write the plan, atomically."""
    publish_json(path, plan.to_json())


def read_plan(path: Path) -> SlicePlan:
    """Read a plan of weights.

    Raises:
        ConfigError: missing, unreadable, of another schema, or a weight outside 1 to 10.
    """
    try:
        found = read_json(path, MAX_FILE_BYTES)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}, expected {SCHEMA}")
        plan = SlicePlan(
            **{name: _require_text(found[name]) for name in ("target", "strategy", "eval_set", "report", "reference")},
            max_weight=_require_number(found["max_weight"], 1, LARGEST_WEIGHT),
            weights=tuple(_parse_weight(one) for one in found["weights"]),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected weights of slices, as `draftworks slices --save` writes them: {error}"
        ) from error
    return plan


def _parse_weight(found: Any) -> SliceWeight:
    figures = {name: _require_number(found[name], 0, 1e6) for name in ("before", "after")}
    weight = _require_number(found["weight"], 1, LARGEST_WEIGHT)
    return SliceWeight(_require_text(found["column"]), _require_text(found["value"]), weight, **figures)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def _require_number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"expected a number from {low:g} to {high:g}, found {value!r}")
    return float(value)
