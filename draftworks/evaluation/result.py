"""Sums over batches and ranks, and the ratios made of them. Counts are added in float64 before any division."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftworks.distributed.collectives import gather_from_ranks, sum_over_ranks
from draftworks.drafts.strategy import StepOutput

CORRECT, SUPERVISED = "acc_corrects", "acc_denoms"
BLOCK_METRIC, WALK_METRIC = "eval/rung2_block_acc_len", "eval/rung3_walk_acc_len"
RATE = "eval/acceptance_rate_"
CONDITIONAL_RATE, UNCONDITIONAL_RATE = "eval/conditional_acceptance_rate_", "eval/unconditional_acceptance_rate_"
SCALARS = ("loss_sum", "loss_weight", "tokens")
_WITH_A_NAME = ("loss", "acceptance", "unconditional_acceptance")


class AcceptanceRates(NamedTuple):
    """Probability that rejection sampling accepts what the draft says, by position, on teacher-forced text.

    Attributes:
        conditional: over the positions whose label is in the draft's vocabulary.
        unconditional: over all; None where it was not counted, or the draft says all of the target's tokens.
        coverage: share of the labels at the first position that are in the draft's vocabulary.
    """

    conditional: tuple[float, ...]
    unconditional: tuple[float, ...] | None
    coverage: float


@dataclass(frozen=True)
class EvalResult:
    """What a draft did on an eval set, or on some steps of its training.

    The acceptance numbers are rungs 0 and 1 of the ladder: teacher-forced accuracy per position, and the product of
    these marginals. Neither is an acceptance length measured by decoding.

    Attributes:
        loss_sum, loss_weight: the loss is their ratio; a draft without a loss has weight 0.
        tokens: all tokens the draft saw, supervised or not, without padding.
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
        """Supervised tokens per position: the denominators of the accuracies."""
        return self.metric_sums.get(SUPERVISED, ())

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised[0]) if self.supervised else 0

    @property
    def avg_loss(self) -> float | None:
        return self.loss_sum / self.loss_weight if self.loss_weight else None

    @property
    def per_position_acc(self) -> tuple[float, ...]:
        """Rung 0: share of supervised tokens whose proposal at position i is the target's own argmax."""
        return _ratios(self.correct, self.supervised)

    @property
    def avg_acc(self) -> float:
        """Accuracy at the first position: SpecForge's for drafts that unroll. For block drafts its Evaluator has one accuracy
        over all places of a block."""
        return self.per_position_acc[0] if self.correct else 0.0

    @property
    def simulated_acc_len(self) -> float:
        """Rung 1: a0 + a0 a1 + a0 a1 a2 + ...: accepted draft tokens, had positions been independent. SpecForge's Evaluator has
        this number of drafts that unroll; for block drafts it repeats its one accuracy under this name."""
        length, product = 0.0, 1.0
        for accuracy in self.per_position_acc:
            product *= accuracy
            length += product
        return length

    @property
    def acceptance_rates(self) -> AcceptanceRates | None:
        """None where they were not counted."""
        rates, anywhere = self._by_position("acceptance"), self._by_position("unconditional_acceptance")
        taught, supervised = (sum(self.metric_sums.get(name, ())[:1]) for name in ("acceptance_denoms", SUPERVISED))
        return AcceptanceRates(rates, anywhere or None, taught / max(supervised, 1.0)) if rates else None

    def metrics(self) -> dict[str, Any]:
        """Under the names of SpecForge's Evaluator where it has one, those that the strategy does not count being absent; then
        the strategy's own."""
        named: dict[str, Any] = {
            "eval/avg_acc": self.avg_acc,
            "eval/per_position_acc": list(self.per_position_acc),
            "eval/simulated_acc_len": self.simulated_acc_len,
            "eval/supervised_tokens": self.supervised_tokens,
        }
        if self.avg_loss is not None:
            named["eval/avg_loss"] = self.avg_loss
        named |= {f"eval/ploss_{i}": loss for i, loss in enumerate(self._by_position("loss"))}
        return named | self._named_rates() | self._own_metrics() | self._replayed_metrics()

    def _named_rates(self) -> dict[str, float]:
        """Under one name where there is one number: of a draft that says all tokens, and in results that are older than the
        second.
        """
        found = self.acceptance_rates
        if found is None:
            return {}
        if found.unconditional is None:
            return {f"{RATE}{i}": rate for i, rate in enumerate(found.conditional)}
        named = {f"{CONDITIONAL_RATE}{i}": rate for i, rate in enumerate(found.conditional)}
        return named | {f"{UNCONDITIONAL_RATE}{i}": rate for i, rate in enumerate(found.unconditional)}

    def _by_position(self, name: str) -> tuple[float, ...]:
        return _ratios(self.metric_sums.get(f"{name}_sums", ()), self.metric_sums.get(f"{name}_denoms", ()))

    def _own_metrics(self) -> dict[str, float | list[float]]:
        """`eval/X` for each `X_sums` with `X_denoms` that only this strategy counts: a number, or one per position."""
        names = [name.removesuffix("_sums") for name in self.metric_sums if name.endswith("_sums")]
        own = {
            name: list(_ratios(self.metric_sums[f"{name}_sums"], self.metric_sums[f"{name}_denoms"]))
            for name in names
            if name not in _WITH_A_NAME and f"{name}_denoms" in self.metric_sums
        }
        return {f"eval/{name}": values[0] if len(values) == 1 else values for name, values in own.items()}

    def _replayed_metrics(self) -> dict[str, float]:
        """Rungs 2 and 3, where the evaluation replayed them; see `draftworks.evaluation.ladder.replay`."""
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
            {name: _added(self.metric_sums.get(name, ()), other.metric_sums.get(name, ())) for name in names},
        )

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "counts": values.pop("metric_sums")}  # `counts` is the name in files

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvalResult:
        metric_sums = {name: tuple(sums) for name, sums in values["counts"].items()}
        return cls(values["loss_sum"], values["loss_weight"], values["tokens"], metric_sums)


def find_metric(metrics: Mapping[str, Any], name: str) -> Any:
    """The value of a metric, also by the name that it had before two rates were told apart; None where there is none."""
    if name.startswith(RATE) and name not in metrics:
        return metrics.get(CONDITIONAL_RATE + name.removeprefix(RATE))
    return metrics.get(name)


class MetricAccumulator:
    """Adds up `StepOutput`s on their device, without waiting for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, output: StepOutput, tokens: int) -> None:
        """Add the sums of one micro-batch of so many tokens."""
        scalars = {
            "loss_sum": output.loss_sum,
            "loss_weight": output.loss_weight,
            # Filled in where it is added up: a number of the host would be waited for there.
            "tokens": torch.full((), tokens, dtype=torch.float64, device=output.loss_sum.device),
        }
        for name, value in {**scalars, **output.metric_sums}.items():
            value = value.detach().reshape(-1).to(output.loss_sum.device, torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def layout(self) -> dict[str, int]:
        """Names and lengths of the sums, which two ranks must agree on before they add them."""
        return {name: len(value) for name, value in self._sums.items()}

    def sum_over_ranks(self, layout: Mapping[str, int] | None = None) -> EvalResult:
        """The sums of all ranks, by one collective.

        Args:
            layout: what is added, in order, the same on every rank; by default this rank's own.
        """
        lengths = self.layout() if layout is None else layout
        packed = [self._padded(name, length) for name, length in lengths.items()]
        total = sum_over_ranks(torch.cat(packed)).split(list(lengths.values())) if packed else ()
        sums = {name: tuple(values.tolist()) for name, values in zip(lengths, total)}
        loss_sum, loss_weight, tokens = (sum(sums.pop(name, ())) for name in SCALARS)
        return EvalResult(loss_sum, loss_weight, int(tokens), sums)

    def _padded(self, name: str, length: int) -> Tensor:
        value = self._sums.get(name, torch.zeros(0, dtype=torch.float64))
        return torch.nn.functional.pad(value, (0, length - len(value)))


def agree_on_layout(tally: MetricAccumulator) -> dict[str, int]:
    """The union of all ranks' layouts, so that a rank without a batch can join the sums. A collective."""
    layout: dict[str, int] = {}
    for theirs in gather_from_ranks(tally.layout()):
        for name, length in theirs.items():
            layout[name] = max(length, layout.get(name, 0))
    return layout


def _ratios(numerators: tuple[float, ...], denominators: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(top / max(bottom, 1.0) for top, bottom in zip(numerators, denominators))


def _added(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    if not left or not right:
        return left or right
    return tuple(a + b for a, b in zip(left, right, strict=True))
