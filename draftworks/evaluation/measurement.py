"""What was measured of one draft on one eval set, rung by rung."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftworks.evaluation.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.result import EvalResult


@dataclass(frozen=True)
class LoopMeasurement:
    """Rung 4 at one temperature: the same prompts decoded with the draft and without it, one at a time.

    Attributes:
        seconds, plain_seconds: of decoding all prompts, prefill included; `tokens`, `plain_tokens` what came out.
    """

    temperature: float
    prompts: tuple[PromptAcceptance, ...]
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int

    @property
    def speed_up(self) -> float:
        """Tokens per second with the draft over tokens per second without it, on this machine and engine."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


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
        counted = {f"eval/{name}_acc_len": micro_mean(prompts) for name, prompts in self.rungs().items()}
        speed_ups = {f"eval/rung4_loop_t{loop.temperature:g}_speed_up": loop.speed_up for loop in self.loops}
        return {**self.result.metrics(), **counted, **speed_ups}

    def rungs(self) -> dict[str, tuple[PromptAcceptance, ...]]:
        """What counts passes, by the name under which it is published."""
        counted = {"rung2_block": self.blocks, "rung3_walk": self.walk}
        counted |= {f"rung4_loop_t{loop.temperature:g}": loop.prompts for loop in self.loops}
        return {name: prompts for name, prompts in counted.items() if prompts}
