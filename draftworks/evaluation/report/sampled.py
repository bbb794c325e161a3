"""What is said of acceptance above temperature 0: by which rule, of which servers, over which contexts. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftworks.config.data import AnswersSampling
from draftworks.config.decoding import RULE_MEANINGS, AcceptanceRule, Decoding, describe_servers
from draftworks.evaluation.strategy_metrics import ACCEPTANCE_RATES

RATES_RULE: AcceptanceRule = "rejection"
"""The rule of `eval/acceptance_rate_i` and `eval/tau`, at temperature 1, as in SpecForge and speculators."""
_SIMULATED, _LOOP, _LOOP_END = "eval/simulated_acc_len_", "eval/rung4_loop_", "_acc_len"


@dataclass(frozen=True)
class SampledAcceptance:
    """Accepted draft tokens per pass by one decoding; `simulated` is rung 1, `loop` rung 4, None where not measured."""

    decoding: Decoding
    servers: str
    simulated: float | None = None
    loop: float | None = None


def list_sampled_acceptance(strategy: str, metrics: Mapping[str, Any]) -> list[SampledAcceptance]:
    """Return what an evaluation's metrics have above temperature 0, one entry per decoding, in their order."""
    simulated: dict[Decoding, float] = {}
    loops: dict[Decoding, float] = {}
    for name, value in metrics.items():
        if name.startswith(_SIMULATED):
            simulated[Decoding.parse(name.removeprefix(_SIMULATED))] = value
        elif name.startswith(_LOOP) and name.endswith(_LOOP_END):
            loops[Decoding.parse(name.removeprefix(_LOOP).removesuffix(_LOOP_END))] = value
    found = dict.fromkeys(each for each in (*simulated, *loops) if each.rule is not None)
    return [
        SampledAcceptance(each, describe_servers(strategy, each.rule), simulated.get(each), loops.get(each))
        for each in found
    ]


def describe_rates(strategy: str, metrics: Mapping[str, Any]) -> str:
    """Return by which rule `tau` and the acceptance rates are, if they are among an evaluation's metrics; else an empty text."""
    names = [name for name in ("tau", *ACCEPTANCE_RATES) if any(_is_rate(metric, name) for metric in metrics)]
    if not names:
        return ""
    return f"{', '.join(names)}: by {RATES_RULE} at temperature 1 ({describe_servers(strategy, RATES_RULE)})"


def _is_rate(metric: str, name: str) -> bool:
    return metric == f"eval/{name}" or (name != "tau" and metric.startswith(f"eval/{name}_"))


def describe_rules(rules: Mapping[AcceptanceRule, str]) -> list[str]:
    """Return a sentence for each rule, by name with the servers that have it."""
    return [f"`{rule}` ({servers}): {RULE_MEANINGS[rule]}." for rule, servers in rules.items()]


def describe_contexts(decodings: Iterable[Decoding], answers: AnswersSampling | None) -> str:
    """Return whose contexts rung 1 was computed over, and whether a server would meet them.

    Args:
        decodings: those of rung 1; none gives an empty text.
        answers: how the target wrote the stored answers; None if others did, or if it is not known.
    """
    found = list(decodings)
    if not found:
        return ""
    contexts = "Rung 1 above temperature 0 is over the contexts of the stored answers"
    if answers is None:
        return (
            f"{contexts}, which are not known to be this target's: it is no promise of what is served. Rung 4 samples."
        )
    written = f"{contexts}, which this target wrote {answers.describe()}"
    other = list(dict.fromkeys(each.describe() for each in found if not answers.writes_as(each)))
    if not other:
        return f"{written}, as is served there."
    return f"{written}. Served at {' and at '.join(other)} they are others: it is no promise for these. Rung 4 samples."
