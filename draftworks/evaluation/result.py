"""Metric sums over batches and ranks, and their ratios. Sums are added in float64 before any division."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftworks.config.decoding import Decoding
from draftworks.config.strategies import MetricSums
from draftworks.distributed.collectives import gather_from_ranks, sum_over_ranks
from draftworks.drafts.sampling import PREFIX
from draftworks.drafts.strategy import StepOutput

CORRECT, SUPERVISED = "acc_corrects", "acc_denoms"
SIMULATED_METRIC = "eval/simulated_acc_len"
BLOCK_METRIC, WALK_METRIC = "eval/rung2_block_acc_len", "eval/rung3_walk_acc_len"
RATE = "eval/acceptance_rate_"
CONDITIONAL_RATE, UNCONDITIONAL_RATE = "eval/conditional_acceptance_rate_", "eval/unconditional_acceptance_rate_"
SCALARS = ("loss_sum", "loss_weight", "tokens")
_NAMED_SUMS = ("loss", "acceptance", "unconditional_acceptance")
"""Sums whose metrics do not follow the rule that `X_sums` and `X_denoms` become `eval/X`."""


class AcceptanceRates(NamedTuple):
    """Probability that rejection sampling at temperature 1 accepts the draft's token, by draft position, on teacher-forced text.

    SpecForge's numbers, and no server's unless it drafts by sampling: see draftworks.config.decoding.

    Attributes:
        conditional: mean over the positions whose label is in the draft's vocabulary.
        unconditional: mean over all positions; None if it was not measured or the draft has the target's vocabulary.
        coverage: share of the labels at the first draft position that are in the draft's vocabulary.
    """

    conditional: tuple[float, ...]
    unconditional: tuple[float, ...] | None
    coverage: float


@dataclass(frozen=True)
class EvalResult:
    """Metric sums of a draft over an eval set, or over some optimizer steps of its training.

    Its acceptance numbers are rungs 0 and 1 of the ladder: teacher-forced accuracy by draft position, and a length
    from their products. Neither is an acceptance length measured by decoding.

    Attributes:
        loss_sum, loss_weight: the loss is their ratio; a draft without a loss has weight 0.
        tokens: number of tokens the draft read, supervised or not, without padding.
        metric_sums: the strategy's sums by name, one value per draft position.
    """

    loss_sum: float
    loss_weight: float
    tokens: int
    metric_sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> EvalResult:
        """The neutral element of +."""
        return cls(0.0, 0.0, 0)

    @property
    def correct(self) -> tuple[float, ...]:
        return self.metric_sums.get(CORRECT, ())

    @property
    def supervised(self) -> tuple[float, ...]:
        """Number of supervised tokens by draft position: the denominators of the accuracies."""
        return self.metric_sums.get(SUPERVISED, ())

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised[0]) if self.supervised else 0

    @property
    def avg_loss(self) -> float | None:
        return self.loss_sum / self.loss_weight if self.loss_weight else None

    @property
    def per_position_acc(self) -> tuple[float, ...]:
        """Rung 0: share of supervised tokens whose proposal at draft position i is the target's argmax."""
        return _ratios(self.correct, self.supervised)

    @property
    def avg_acc(self) -> float:
        """Accuracy at the first draft position.

        SpecForge's Evaluator reports it for drafts that unroll; for block drafts it has one accuracy over all places.
        """
        return self.per_position_acc[0] if self.correct else 0.0

    @property
    def simulated_acc_len(self) -> float:
        """Rung 1: a0 + a0 a1 + a0 a1 a2 + …, the accepted draft tokens if draft positions were independent.

        SpecForge's Evaluator reports it for drafts that unroll; for block drafts it repeats its one accuracy here.
        """
        return _chain_length(self.per_position_acc)

    @property
    def sampled_acc_lens(self) -> dict[Decoding, float]:
        """Rung 1 of sampling servers, by decoding: a0 + a0 a1 + a0 a1 a2 + …, where a_i is the mean at draft position i of the
        probability that they accept by its rule. Empty if it was not measured.
        """
        names = [name.removesuffix("_sums") for name in self.metric_sums if name.endswith("_sums")]
        rates = {Decoding.parse(name.removeprefix(PREFIX)): name for name in names if name.startswith(PREFIX)}
        return {decoding: _chain_length(self._by_position(name)) for decoding, name in rates.items()}

    @property
    def acceptance_rates(self) -> AcceptanceRates | None:
        """The rates of rejection sampling; None if they were not measured."""
        conditional, unconditional = self._by_position("acceptance"), self._by_position("unconditional_acceptance")
        covered, supervised = (sum(self.metric_sums.get(name, ())[:1]) for name in ("acceptance_denoms", SUPERVISED))
        if not conditional:
            return None
        return AcceptanceRates(conditional, unconditional or None, covered / max(supervised, 1.0))

    def metrics(self) -> dict[str, Any]:
        """Return all metrics by name: SpecForge's names where its Evaluator has one, then those of the strategy.

        A metric that the strategy has no sums for is absent.
        """
        named: dict[str, Any] = {
            "eval/avg_acc": self.avg_acc,
            "eval/per_position_acc": list(self.per_position_acc),
            SIMULATED_METRIC: self.simulated_acc_len,
            "eval/supervised_tokens": self.supervised_tokens,
        }
        if self.avg_loss is not None:
            named["eval/avg_loss"] = self.avg_loss
        named |= {f"eval/ploss_{i}": loss for i, loss in enumerate(self._by_position("loss"))}
        named |= {f"{SIMULATED_METRIC}_{each.suffix}": length for each, length in self.sampled_acc_lens.items()}
        return named | self._rate_metrics() | self._strategy_metrics() | self._replay_metrics()

    def _rate_metrics(self) -> dict[str, float]:
        """One name if there is one rate: for a full vocabulary, and in results from before the rates were split."""
        rates = self.acceptance_rates
        if rates is None:
            return {}
        if rates.unconditional is None:
            return {f"{RATE}{i}": rate for i, rate in enumerate(rates.conditional)}
        named = {f"{CONDITIONAL_RATE}{i}": rate for i, rate in enumerate(rates.conditional)}
        return named | {f"{UNCONDITIONAL_RATE}{i}": rate for i, rate in enumerate(rates.unconditional)}

    def _by_position(self, name: str) -> tuple[float, ...]:
        return _ratios(self.metric_sums.get(f"{name}_sums", ()), self.metric_sums.get(f"{name}_denoms", ()))

    def _strategy_metrics(self) -> dict[str, float | list[float]]:
        """Return `eval/X` for each `X_sums` with `X_denoms` of this strategy: a number, or one per draft position."""
        names = [name.removesuffix("_sums") for name in self.metric_sums if name.endswith("_sums")]
        own = {
            name: list(_ratios(self.metric_sums[f"{name}_sums"], self.metric_sums[f"{name}_denoms"]))
            for name in names
            if name not in _NAMED_SUMS and f"{name}_denoms" in self.metric_sums
        }
        return {f"eval/{name}": values[0] if len(values) == 1 else values for name, values in own.items()}

    def _replay_metrics(self) -> dict[str, float]:
        """Return rungs 2 and 3 if the evaluation replayed them; see `draftworks.evaluation.ladder.replay`."""
        named = {}
        for metric, rung in ((BLOCK_METRIC, "block"), (WALK_METRIC, "walk")):
            passes = sum(self.metric_sums.get(f"{rung}_passes", ()))
            if passes:
                named[metric] = sum(self.metric_sums[f"{rung}_accepted"]) / passes
        return named

    def __add__(self, other: EvalResult) -> EvalResult:
        names = self.metric_sums.keys() | other.metric_sums.keys()
        return EvalResult(
            self.loss_sum + other.loss_sum,
            self.loss_weight + other.loss_weight,
            self.tokens + other.tokens,
            {name: _add(self.metric_sums.get(name, ()), other.metric_sums.get(name, ())) for name in names},
        )

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "counts": values.pop("metric_sums")}  # `counts` is the name in files

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvalResult:
        metric_sums = {name: tuple(sums) for name, sums in values["counts"].items()}
        return cls(values["loss_sum"], values["loss_weight"], values["tokens"], metric_sums)


def find_metric(metrics: Mapping[str, Any], name: str) -> Any:
    """Return a metric's value, or None without one. Finds `acceptance_rate` under its newer, conditional name too."""
    if name.startswith(RATE) and name not in metrics:
        return metrics.get(CONDITIONAL_RATE + name.removeprefix(RATE))
    return metrics.get(name)


class MetricAccumulator:
    """Adds up the metric sums of `StepOutput`s on their device, without synchronizing with it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, output: StepOutput, tokens: int) -> None:
        """Add the sums of one micro-batch of `tokens` tokens."""
        scalars = {
            "loss_sum": output.loss_sum,
            "loss_weight": output.loss_weight,
            # Created on the device: copying a number from the host would synchronize.
            "tokens": torch.full((), tokens, dtype=torch.float64, device=output.loss_sum.device),
        }
        for name, value in {**scalars, **output.metric_sums}.items():
            value = value.detach().reshape(-1).to(output.loss_sum.device, torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def get_layout(self) -> dict[str, int]:
        """Return the names and lengths of the sums, which must be the same on all ranks before they are added."""
        return {name: len(value) for name, value in self._sums.items()}

    def sum_over_ranks(self, layout: Mapping[str, int] | None = None) -> EvalResult:
        """Return the sums over all ranks, by one collective.

        Args:
            layout: names and lengths to add, in order, the same on every rank; by default this rank's.
        """
        lengths = self.get_layout() if layout is None else layout
        packed = [self._pad(name, length) for name, length in lengths.items()]
        total = sum_over_ranks(torch.cat(packed)).split(list(lengths.values())) if packed else ()
        sums = {name: tuple(values.tolist()) for name, values in zip(lengths, total)}
        loss_sum, loss_weight, tokens = (sum(sums.pop(name, ())) for name in SCALARS)
        return EvalResult(loss_sum, loss_weight, int(tokens), sums)

    def _pad(self, name: str, length: int) -> Tensor:
        value = self._sums.get(name, torch.zeros(0, dtype=torch.float64))
        return torch.nn.functional.pad(value, (0, length - len(value)))


def agree_on_layout(accumulator: MetricAccumulator) -> dict[str, int]:
    """Return the union of all ranks' layouts, so that a rank without a batch can take part. A collective."""
    layout: dict[str, int] = {}
    for rank_layout in gather_from_ranks(accumulator.get_layout()):
        for name, length in rank_layout.items():
            layout[name] = max(length, layout.get(name, 0))
    return layout


def _chain_length(rates: tuple[float, ...]) -> float:
    """Return r0 + r0 r1 + r0 r1 r2 + …"""
    length, product = 0.0, 1.0
    for rate in rates:
        product *= rate
        length += product
    return length


def _ratios(numerators: tuple[float, ...], denominators: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(top / max(bottom, 1.0) for top, bottom in zip(numerators, denominators))


def _add(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0.0))


def make_example_metrics(sums: MetricSums) -> dict[str, Any]:
    """Return `EvalResult.metrics` of an evaluation with these sums, rungs 2 and 3 replayed. Its values mean nothing."""
    names = {**dict.fromkeys(sums.by_place, sums.places), **dict.fromkeys(sums.by_block, 1)}
    counted = {CORRECT: sums.places, SUPERVISED: sums.places}
    counted |= {f"{name}_{part}": count for name, count in names.items() for part in ("sums", "denoms")}
    counted |= {f"{rung}_{part}": 1 for rung in ("block", "walk") for part in ("passes", "accepted")}
    return EvalResult(1.0, 1.0, 1, {name: (1.0,) * count for name, count in counted.items()}).metrics()
