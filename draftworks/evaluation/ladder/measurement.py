"""What was measured of one draft on one eval set, rung by rung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.result import EvalResult

TIMED_FIELDS = ("temperature", "seconds", "plain_seconds", "tokens", "plain_tokens")


@dataclass(frozen=True)
class TimingContext:
    """Where and when something was timed. `date` has a time zone."""

    device: str
    date: datetime

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "date": self.date.isoformat()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TimingContext:
        return cls(values["device"], datetime.fromisoformat(values["date"]))


@dataclass(frozen=True)
class LoopMeasurement:
    """Rung 4 at one temperature: the same prompts decoded with the draft and without it, one at a time.

    Attributes:
        seconds, plain_seconds: of decoding all prompts, prefill included; `tokens`, `plain_tokens` what came out.
        differences: where the loop and the walk part; None where they were not compared, as at a temperature above 0.
        timing_context: of the seconds: a measurement may be older than the report it is in. None where it is not known.
    """

    temperature: float
    prompts: tuple[PromptAcceptance, ...]
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
    differences: tuple[Difference, ...] | None = None
    timing_context: TimingContext | None = None

    @property
    def speed_up(self) -> float:
        """Tokens per second with the draft over tokens per second without it, on this machine and engine."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)

    def to_json(self) -> dict[str, Any]:
        """All but the prompts, of which there may be many."""
        return {
            **{name: getattr(self, name) for name in TIMED_FIELDS},
            "differences": None if self.differences is None else [asdict(each) for each in self.differences],
            "occasion": None if self.timing_context is None else self.timing_context.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompts: tuple[PromptAcceptance, ...]) -> LoopMeasurement:
        """From `to_json`, which may have more entries than these, and of old reports has no differences and no timing context."""
        differences, context = values.get("differences"), values.get("occasion")
        return cls(
            prompts=prompts,
            **{name: values[name] for name in TIMED_FIELDS},
            differences=None if differences is None else tuple(Difference.from_json(each) for each in differences),
            timing_context=None if context is None else TimingContext.from_json(context),
        )


@dataclass(frozen=True)
class DraftMeasurement:
    """One draft. Rungs that were not measured are empty.

    Attributes:
        result: rungs 0 and 1.
        blocks, walk: rungs 2 and 3, prompt by prompt.
        loops: rung 4, one per temperature.
    """

    result: EvalResult
    blocks: tuple[PromptAcceptance, ...] = ()
    walk: tuple[PromptAcceptance, ...] = ()
    loops: tuple[LoopMeasurement, ...] = field(default_factory=tuple)

    def metrics(self) -> dict[str, Any]:
        """All rungs by name: those of the result, and accepted tokens per pass of the others."""
        counted = {f"eval/{name}_acc_len": micro_mean(prompts) for name, prompts in self.prompts_by_rung().items()}
        speed_ups = {f"eval/rung4_loop_t{loop.temperature:g}_speed_up": loop.speed_up for loop in self.loops}
        return {**self.result.metrics(), **counted, **speed_ups}

    def prompts_by_rung(self) -> dict[str, tuple[PromptAcceptance, ...]]:
        """What counts passes, by the name under which it is published."""
        counted = {"rung2_block": self.blocks, "rung3_walk": self.walk}
        counted |= {f"rung4_loop_t{loop.temperature:g}": loop.prompts for loop in self.loops}
        return {name: prompts for name, prompts in counted.items() if prompts}
