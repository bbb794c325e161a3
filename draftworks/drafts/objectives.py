"""What a draft is trained towards: the target's distribution, or directly the probability that its tokens are accepted.

In a row, p is the draft's distribution over its vocabulary, q the target's, renormalised over that vocabulary, and q̃ the
target's as it is, as far as it lies in there. CE = −Σ_v q_v log p_v, and α = Σ_v min(q̃_v, p_v) is the probability that
rejection sampling accepts a token drawn from p. By the draft's logits z,

    ∂CE/∂z = p − q,    ∂α/∂z = p ⊙ (m − Σ_v m_v p_v)  with  m_v = 1 where p_v < q̃_v, else 0.

The LK losses (as SpecForge has them) are made of means over all rows that a step teaches in a batch. Those are the
`BatchObjective`s. The others say the same of every row by itself, so that nothing depends on which rows share a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from draftworks.drafts.teacher import Pupils


class Graded(NamedTuple):
    """Sums over the rows of a step: the objective, argmaxes that are the label, α where the teacher's mass is known; and
    the objective's derivative by the logits (n, V_d), where it is asked for."""

    loss: Tensor
    correct: Tensor
    accepted: Tensor | None
    d_logits: Tensor | None


class Objective(ABC):
    """A loss that is a sum over rows."""

    needs_mass: ClassVar[bool]
    """Whether it reads the target's probability mass in the draft vocabulary."""

    @abstractmethod
    def grade(self, step: int, logits: Tensor, pupils: Pupils, with_grad: bool) -> Graded:
        """Grade the rows of one step by their logits (n, V_d), at least float32."""


class CrossEntropy(Objective):
    """CE."""

    needs_mass = False

    def grade(self, step: int, logits: Tensor, pupils: Pupils, with_grad: bool) -> Graded:
        top = logits.max(-1)
        p = logits.softmax(-1)
        ce = _log_sum_exp(top, p).sum() - torch.dot(pupils.q.view(-1), logits.view(-1))
        accepted = None if pupils.mass is None else torch.minimum(pupils.q * pupils.mass, p).sum()
        correct = (top.indices == pupils.labels).sum()
        return Graded(ce, correct, accepted, p.sub_(pupils.q) if with_grad else None)


class RowLosses(NamedTuple):
    """Losses of n rows, and what they grow by with a row's CE and its α; (n, 1) each."""

    loss: Tensor
    by_ce: Tensor
    by_accepted: Tensor


class AcceptanceObjective(Objective):
    """A function of CE and α of every row."""

    needs_mass = True

    @abstractmethod
    def rows(self, step: int, ce: Tensor, accepted: Tensor) -> RowLosses:
        """From CE and α, (n, 1) each."""

    def grade(self, step: int, logits: Tensor, pupils: Pupils, with_grad: bool) -> Graded:
        top = logits.max(-1)
        p = logits.softmax(-1)
        whole = pupils.q * pupils.mass
        accepted = torch.minimum(whole, p).sum(-1, keepdim=True)
        ce = (_log_sum_exp(top, p) - torch.linalg.vecdot(pupils.q, logits))[:, None]
        rows = self.rows(step, ce, accepted)
        correct = (top.indices == pupils.labels).sum()
        d_logits = _by_logits(p, pupils.q, whole, rows) if with_grad else None
        return Graded(rows.loss.sum(), correct, accepted.sum(), d_logits)


@dataclass(frozen=True)
class LogAcceptance(AcceptanceObjective):
    """−log α, times `weights[step]` if there are any. A row with α = 0 costs nothing and teaches nothing."""

    weights: tuple[float, ...] | None = None

    def rows(self, step: int, ce: Tensor, accepted: Tensor) -> RowLosses:
        weight = 1.0 if self.weights is None else self.weights[step]
        possible = accepted > 0
        loss = torch.where(possible, accepted.log() * -weight, 0)
        return RowLosses(loss, torch.zeros_like(ce), torch.where(possible, -weight / accepted, 0))


@dataclass(frozen=True)
class Blend(AcceptanceObjective):
    """w·CE + (1 − w)·(1 − α) with w = kl_scale·exp(−kl_decay·α) of the row itself, through which nothing is learnt."""

    kl_scale: float
    kl_decay: float

    def rows(self, step: int, ce: Tensor, accepted: Tensor) -> RowLosses:
        share = self.kl_scale * torch.exp(-self.kl_decay * accepted)
        return RowLosses(share * ce + (1 - share) * (1 - accepted), share, share - 1)


@dataclass(frozen=True)
class FixedBlend(AcceptanceObjective):
    """ce_weights[step]·CE + miss_weights[step]·(1 − α)."""

    ce_weights: tuple[float, ...]
    miss_weights: tuple[float, ...]

    def rows(self, step: int, ce: Tensor, accepted: Tensor) -> RowLosses:
        by_ce, by_miss = self.ce_weights[step], self.miss_weights[step]
        loss = by_ce * ce + by_miss * (1 - accepted)
        return RowLosses(loss, torch.full_like(ce, by_ce), torch.full_like(ce, -by_miss))


class BatchObjective(ABC):
    """An objective made of means over a batch: what it asks of a row is known once all of its steps' rows are."""

    @abstractmethod
    def given(self, accepted: Tensor, taught: Tensor) -> Objective:
        """The same as a sum over rows, for this batch.

        Args:
            accepted: (T,) float64, Σ α of each step's rows.
            taught: (T,) float64, how many they are. A step without any costs nothing (SpecForge adds 1 − kl_scale, a constant).
        """


@dataclass(frozen=True)
class MeanLogAcceptance(BatchObjective):
    """LK loss `alpha`: −mean(log α) of every step."""

    def given(self, accepted: Tensor, taught: Tensor) -> Objective:
        return LogAcceptance(_as_floats(1 / taught.clamp(min=1)))


@dataclass(frozen=True)
class MeanBlend(BatchObjective):
    """LK loss `lambda`: w·(Σ CE / positions) + (1 − w)·(1 − mean α), w = kl_scale·exp(−kl_decay·mean α), of every step.

    Attributes:
        positions: B·S, padding and prompts counted.
    """

    kl_scale: float
    kl_decay: float
    positions: int

    def given(self, accepted: Tensor, taught: Tensor) -> Objective:
        rows = taught.clamp(min=1)
        share = self.kl_scale * torch.exp(-self.kl_decay * accepted / rows)
        return FixedBlend(_as_floats(share / self.positions), _as_floats((1 - share) / rows))


def _by_logits(p: Tensor, q: Tensor, whole: Tensor, rows: RowLosses) -> Tensor:
    """The chain rule over CE and α, see the top of this module. Overwrites p."""
    short = p * (p < whole)
    inside = rows.by_ce - rows.by_accepted * short.sum(-1, keepdim=True)
    return p.mul_(inside).addcmul_(short, rows.by_accepted).addcmul_(q, rows.by_ce, value=-1)


def _log_sum_exp(top: torch.return_types.max, p: Tensor) -> Tensor:
    """Of logits (n, V_d), from their maxima and their softmax: (n,), one pass less over them."""
    return top.values - p.gather(1, top.indices[:, None]).squeeze(1).log()


def _as_floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
