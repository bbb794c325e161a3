"""Measurements of one draft on one eval set, by rung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from draftworks.config.decoding import Decoding
from draftworks.evaluation.ladder.prompt_acceptance import Difference, PromptAcceptance, PromptsByPosition, micro_mean
from draftworks.evaluation.result import EvalResult

TIMED_FIELDS = ("seconds", "plain_seconds", "tokens", "plain_tokens")


@dataclass(frozen=True)
class TimingContext:
    """Device and time of a timing. `date` has a time zone."""

    device: str
    date: datetime

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "date": self.date.isoformat()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TimingContext:
        return cls(values["device"], datetime.fromisoformat(values["date"]))


@dataclass(frozen=True)
class LoopMeasurement:
    """Rung 4 by one decoding: the same prompts decoded with the draft and without it, one prompt at a time.

    Attributes:
        decoding: temperature, cuts, and the rule by which tokens are accepted.
        seconds, plain_seconds: time of decoding all prompts with and without the draft, with prefill.
        tokens, plain_tokens: number of tokens of these answers.
        differences: where the loop and the walk differ; None if they were not compared, as at a temperature above 0.
        timing_context: of the seconds, as a measurement may be older than its report. None if it is not known.
    """

    decoding: Decoding
    prompts: tuple[PromptAcceptance, ...]
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
    differences: tuple[Difference, ...] | None = None
    timing_context: TimingContext | None = None

    @property
    def speed_up(self) -> float:
        """Tokens per second with the draft over tokens per second without it, on one machine and engine."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)

    def to_json(self) -> dict[str, Any]:
        """Return all but the prompts, of which there may be many. In files the timing context is `occasion`."""
        return {
            **self.decoding.to_json(),
            **{name: getattr(self, name) for name in TIMED_FIELDS},
            "differences": None if self.differences is None else [asdict(each) for each in self.differences],
            "occasion": None if self.timing_context is None else self.timing_context.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompts: tuple[PromptAcceptance, ...]) -> LoopMeasurement:
        """Read the values of `to_json`. Others are ignored; old reports have no differences and no `occasion`."""
        differences, context = values.get("differences"), values.get("occasion")
        return cls(
            Decoding.from_json(values),
            prompts,
            **{name: values[name] for name in TIMED_FIELDS},
            differences=None if differences is None else tuple(Difference.from_json(each) for each in differences),
            timing_context=None if context is None else TimingContext.from_json(context),
        )


@dataclass(frozen=True)
class DraftMeasurement:
    """All rungs of one draft. A rung that was not measured is empty.

    Attributes:
        result: rungs 0 and 1; None for what proposes without a model, which has a walk only.
        blocks, walk: rungs 2 and 3, one entry per prompt.
        walk_by_position: the walk in every range of places in the text; empty in reports from before there were any.
        loops: rung 4, one entry per decoding.
    """

    result: EvalResult | None
    blocks: tuple[PromptAcceptance, ...] = ()
    walk: tuple[PromptAcceptance, ...] = ()
    walk_by_position: PromptsByPosition = field(default_factory=dict)
    loops: tuple[LoopMeasurement, ...] = field(default_factory=tuple)

    def metrics(self) -> dict[str, Any]:
        """Return all metrics by name: those of `result`, if there is one, accepted tokens per pass of the other rungs, speed-ups."""
        lengths = {f"eval/{name}_acc_len": micro_mean(prompts) for name, prompts in self.prompts_by_rung().items()}
        speed_ups = {f"eval/rung4_loop_{loop.decoding.suffix}_speed_up": loop.speed_up for loop in self.loops}
        return {**({} if self.result is None else self.result.metrics()), **lengths, **speed_ups}

    def prompts_by_rung(self) -> dict[str, tuple[PromptAcceptance, ...]]:
        """Return the measured rungs that count passes, by their published names."""
        rungs = {"rung2_block": self.blocks, "rung3_walk": self.walk}
        rungs |= {f"rung4_loop_{loop.decoding.suffix}": loop.prompts for loop in self.loops}
        return {name: prompts for name, prompts in rungs.items() if prompts}
