"""All numbers of a report by draft and rung, under their published names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from draftworks.config.decoding import GREEDY, AcceptanceRule, Decoding, describe_servers
from draftworks.errors import ConfigError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import (
    AcceptanceDifference,
    AcceptanceSummary,
    Resampling,
    compare_paired,
    summarize_acceptance,
)
from draftworks.evaluation.report.summary import TRAINED

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.measurement import DraftMeasurement  # it imports torch
    from draftworks.evaluation.result import EvalResult

SIMULATED = "simulated_acc_len"
BLOCK, WALK, LOOP = "rung2_block_acc_len", "rung3_walk_acc_len", "rung4_loop_acc_len"
WALK_AT = f"{WALK}_at_"
"""Followed by the begin of a range of places in the text: names of rows in prompts.parquet, and no metrics."""


@dataclass(frozen=True)
class CountedRung:
    """Measurement on a rung that counts passes (2, 3 or 4)."""

    rung: int
    metric: str
    prompts: tuple[PromptAcceptance, ...]
    decoding: Decoding | None = None
    speed_up: float | None = None


@dataclass(frozen=True)
class Figure:
    """One number of one draft on one rung.

    Attributes:
        acceptance: None on rungs 0 and 1, which count no passes.
        decoding: on rung 4, and on rung 1 where it is of servers that sample.
        servers: those that accept by the decoding's rule; empty without a rule.
    """

    draft: str
    rung: int
    metric: str
    value: float | None
    acceptance: AcceptanceSummary | None = None
    decoding: Decoding | None = None
    speed_up: float | None = None
    servers: str = ""

    @property
    def rule(self) -> AcceptanceRule | None:
        return None if self.decoding is None else self.decoding.rule

    @property
    def is_greedy(self) -> bool:
        """Whether it is no number of a server that samples."""
        return self.decoding is None or self.decoding.temperature == 0

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung,
            "metric": self.metric,
            "value": self.value,
            **({"temperature": None} if self.decoding is None else self.decoding.to_json()),
            **({} if self.rule is None else {"servers": self.servers}),
            "speed_up": self.speed_up,
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
        }


@dataclass(frozen=True)
class BaselineComparison:
    """The trained draft compared with a baseline on the walk."""

    other: str
    paired: AcceptanceDifference

    def to_json(self) -> dict[str, Any]:
        return {"metric": WALK, "rung": 3, "draft": TRAINED, "other": self.other, **self.paired.to_json()}


def get_metric_name(rung: int, decoding: Decoding = GREEDY) -> str:
    """Return the metric name of a rung that counts passes; `decoding` is for rung 4 only."""
    names = {2: BLOCK, 3: WALK, 4: f"{LOOP}_{decoding.suffix}"}
    if rung not in names:
        raise ConfigError(f"rung: expected 2, 3 or 4, found {rung}: the other rungs count no passes")
    return names[rung]


def list_counted_rungs(measured: DraftMeasurement) -> tuple[CountedRung, ...]:
    """Return the measured rungs that count passes, lowest first."""
    rungs = [CountedRung(2, BLOCK, measured.blocks), CountedRung(3, WALK, measured.walk)]
    for loop in measured.loops:
        if loop.prompts:
            name = get_metric_name(4, loop.decoding)
            rungs.append(CountedRung(4, name, loop.prompts, loop.decoding, loop.speed_up))
    return tuple(rung for rung in rungs if rung.prompts)


def list_position_rungs(measured: DraftMeasurement) -> tuple[CountedRung, ...]:
    """Return the walk in every range of places, ascending."""
    return tuple(CountedRung(3, f"{WALK_AT}{begin}", prompts) for begin, prompts in measured.walk_by_position.items())


def collect_figures(
    drafts: Mapping[str, DraftMeasurement], resampling: Resampling, strategy: str
) -> tuple[Figure, ...]:
    """Return the numbers of every draft, lowest rung first; rung 0 has one per draft position."""
    everything = (one for name, measured in drafts.items() for one in _collect_of_draft(name, measured, resampling))
    return tuple(replace(one, servers=describe_servers(strategy, one.rule)) for one in everything)


def compare_on_walk(drafts: Mapping[str, DraftMeasurement], resampling: Resampling) -> tuple[BaselineComparison, ...]:
    """Compare the trained draft with every other draft that has a walk."""
    walked = {name: measured.walk for name, measured in drafts.items() if any(p.passes for p in measured.walk)}
    trained = walked.pop(TRAINED, None)
    if trained is None:
        return ()
    return tuple(BaselineComparison(name, compare_paired(trained, walk, resampling)) for name, walk in walked.items())


def _collect_of_draft(name: str, measured: DraftMeasurement, resampling: Resampling) -> Iterable[Figure]:
    if measured.result is not None:
        yield from _collect_of_result(name, measured.result)
    for rung in list_counted_rungs(measured):
        acceptance = summarize_acceptance(rung.prompts, resampling)
        yield Figure(name, rung.rung, rung.metric, acceptance.micro, acceptance, rung.decoding, rung.speed_up)


def _collect_of_result(name: str, result: EvalResult) -> Iterable[Figure]:
    for position, accuracy in enumerate(result.per_position_acc, start=1):
        yield Figure(name, 0, f"per_position_acc_{position}", accuracy)
    yield Figure(name, 1, SIMULATED, result.simulated_acc_len)
    for decoding, length in result.sampled_acc_lens.items():
        yield Figure(name, 1, f"{SIMULATED}_{decoding.suffix}", length, decoding=decoding)
