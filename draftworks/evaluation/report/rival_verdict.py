"""What a draft is worth beside what a user could have for nothing: the record in report.json, and its words. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_length
from draftworks.storage.words import format_count, list_names

MAX_NAMED_SLICES = 5


@dataclass(frozen=True)
class LostSlice:
    """A slice in which a rival accepts more than the draft, with the whole interval of the difference.

    Attributes:
        accepted, rival_accepted: accepted tokens per pass of the draft and of the rival that has most of them there.
        high: upper end of the interval of their difference, which is below 0.
    """

    column: str
    value: str
    prompts: int
    rival: str
    accepted: float
    rival_accepted: float
    high: float

    def describe(self) -> str:
        values = f"{format_length(self.accepted)} against {format_length(self.rival_accepted)}"
        return f"{self.column} {self.value} ({values} of {self.rival})"


@dataclass(frozen=True)
class RivalVerdict:
    """The trained draft beside the rival that accepts most, on the walk and the prompts of both.

    Attributes:
        rival: its name, see `draftworks.evaluation.rivals.names`, or `untrained`.
        accepted, rival_accepted: accepted tokens per pass.
        low, high: interval of the draft's minus the rival's at the level `confidence`.
        lost: slices that a rival wins, the largest difference first.
    """

    rival: str
    accepted: float
    rival_accepted: float
    low: float
    high: float
    confidence: float
    prompts: int
    lost: tuple[LostSlice, ...] = ()

    @property
    def beats_it(self) -> bool:
        return self.accepted > self.rival_accepted

    @property
    def difference(self) -> float:
        return self.accepted - self.rival_accepted

    def describe(self) -> str:
        """Return a sentence on the whole set, and one on the slices that are lost."""
        text = (
            f"{SYMBOL} {format_length(self.accepted, 3)} on the walk, against {format_length(self.rival_accepted, 3)} of "
            f"{self.rival}, the best that costs nothing: {format_change(self.difference, self.low, self.high)}, on "
            f"{format_count(self.prompts, 'prompt')}"
        )
        return f"{text}. {self.describe_lost()}" if self.lost else text

    def describe_lost(self) -> str:
        """Return where a rival accepts more; empty where none does."""
        if not self.lost:
            return ""
        named = list_names((one.describe() for one in self.lost), MAX_NAMED_SLICES, between="; ")
        return f"It loses to what costs nothing in {named}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lost": [asdict(one) for one in self.lost]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RivalVerdict:
        return cls(**{**values, "lost": tuple(LostSlice(**one) for one in values["lost"])})
