"""What a draft is trained towards: the target's distribution, or directly the probability that its tokens are accepted.

For one label, z are the draft's logits, p = softmax(z) over its vocabulary, q the target's distribution renormalised over
that vocabulary, and q̃ the target's probabilities of those tokens, not renormalised. Then CE = −Σ_v q_v log p_v, and
α = Σ_v min(q̃_v, p_v) is the probability that rejection sampling accepts a token drawn from p. Autograd finds

    ∂CE/∂z = p − q,    ∂α/∂z = p ⊙ (m − Σ_v m_v p_v)  with  m_v = 1 where p_v < q̃_v, else 0.

At a teacher's temperature T both are softmax(z / T) and softmax of the target's logits / T, see `LossSettings`.

The LK losses of SpecForge are made of means over all labels of a step in a batch: these are the `BatchObjective`s. An
`Objective` is the same for every label by itself, so that nothing depends on which samples share a batch.

Of drafts that predict several tokens per position, the label masks and the teacher are here too. The draft at position t and
step i has seen the target's hidden states up to t and the tokens up to t+1+i, and predicts token t+2+i. Its teacher is the
target's distribution at position t+1+i. A label mask (T, B, S) says which of these predictions count in the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.documents import Documents
from draftworks.drafts.logit_losses import LossSums, find_argmax
from draftworks.drafts.sampling import find_served_targets
from draftworks.drafts.strategy import StepContext


class Objective(ABC):
    """A loss that is a sum over labels of a function of CE and α."""

    needs_acceptance: ClassVar[bool] = True
    """Whether it depends on α, for which the teacher's probability mass in the draft vocabulary is computed."""

    @abstractmethod
    def label_losses(self, ce: Tensor, acceptance: Tensor, steps: Tensor) -> Tensor:
        """Return the loss of every label, (n,), from its CE (n,), its α (n,), and its step in the unroll, (n,) int64.

        α is 0 where it was not computed, see `needs_acceptance`.
        """


class CrossEntropy(Objective):
    """CE."""

    needs_acceptance = False

    def label_losses(self, ce: Tensor, acceptance: Tensor, steps: Tensor) -> Tensor:
        return ce


@dataclass(frozen=True)
class LogAcceptance(Objective):
    """−log α, times `weights[step]` if weights are given. A label with α = 0 has neither loss nor gradient."""

    weights: tuple[float, ...] | None = None

    def label_losses(self, ce: Tensor, acceptance: Tensor, steps: Tensor) -> Tensor:
        # log(1) = 0 stands in for log(0), whose gradient would be NaN even where torch.where drops the value.
        losses = -torch.where(acceptance > 0, acceptance, 1.0).log()
        return losses if self.weights is None else losses * _by_step(self.weights, steps, losses)


@dataclass(frozen=True)
class Blend(Objective):
    """w·CE + (1 − w)·(1 − α) with w = kl_scale·exp(−kl_decay·α) of the label itself, a constant for the gradient."""

    kl_scale: float
    kl_decay: float

    def label_losses(self, ce: Tensor, acceptance: Tensor, steps: Tensor) -> Tensor:
        share = self.kl_scale * torch.exp(-self.kl_decay * acceptance.detach())
        return share * ce + (1 - share) * (1 - acceptance)


@dataclass(frozen=True)
class FixedBlend(Objective):
    """ce_weights[step]·CE + miss_weights[step]·(1 − α)."""

    ce_weights: tuple[float, ...]
    miss_weights: tuple[float, ...]

    def label_losses(self, ce: Tensor, acceptance: Tensor, steps: Tensor) -> Tensor:
        return _by_step(self.ce_weights, steps, ce) * ce + _by_step(self.miss_weights, steps, ce) * (1 - acceptance)


class BatchObjective(ABC):
    """An objective made of means over a batch: the weight of a label is known once all labels of its step are."""

    @abstractmethod
    def for_batch(self, acceptance_sums: Tensor, label_counts: Tensor) -> Objective:
        """Return the same objective as a sum over labels, for this batch.

        Args:
            acceptance_sums: (T,) float64, Σ α over the labels of each step.
            label_counts: (T,) float64, number of labels of each step. A step without labels costs nothing (SpecForge
                adds 1 − kl_scale, a constant).
        """


@dataclass(frozen=True)
class MeanLogAcceptance(BatchObjective):
    """LK loss `alpha`: −mean(log α) of every step."""

    def for_batch(self, acceptance_sums: Tensor, label_counts: Tensor) -> Objective:
        return LogAcceptance(_as_floats(1 / label_counts.clamp(min=1)))


@dataclass(frozen=True)
class MeanBlend(BatchObjective):
    """LK loss `lambda`: w·(Σ CE / positions) + (1 − w)·(1 − mean α), w = kl_scale·exp(−kl_decay·mean α), of every step.

    Attributes:
        positions: B·S, padding and prompts counted.
    """

    kl_scale: float
    kl_decay: float
    positions: int

    def for_batch(self, acceptance_sums: Tensor, label_counts: Tensor) -> Objective:
        counts = label_counts.clamp(min=1)
        share = self.kl_scale * torch.exp(-self.kl_decay * acceptance_sums / counts)
        return FixedBlend(_as_floats(share / self.positions), _as_floats((1 - share) / counts))


@dataclass(frozen=True)
class LossSettings:
    """What decides a loss beside the batch and the weights: made once a pass, and handed down whole.

    Attributes:
        ctx: what the pass is for. In evaluations the acceptance probabilities α are those at temperature 1, whatever T is; in
            training they are those of the loss.
        options: the strategy's, from which a loss takes the weights of its terms.
        temperature: T of the teacher, above 0. With z and y the logits of draft and target, p = softmax(z / T) and
            q = softmax(y / T) are compared, and the loss is multiplied by T². For the cross-entropy the gradient is T·(p - q)
            then, whose size hardly depends on T (Hinton, Vinyals & Dean 2015, arXiv 1503.02531, section 2.1).
    """

    ctx: StepContext
    options: Any = None
    temperature: float = 1.0

    @classmethod
    def of(cls, options: Any, ctx: StepContext) -> LossSettings:
        """Return those of a pass of a strategy with these options; one without a teacher has temperature 1."""
        return cls(ctx, options, getattr(options, "teacher_temperature", 1.0))

    @property
    def evaluates(self) -> bool:
        return not self.ctx.training

    @property
    def served(self) -> tuple[Decoding, ...]:
        """How servers decode, for the acceptance probabilities of an evaluation; empty in training."""
        return () if self.ctx.training else self.ctx.served

    @property
    def loss_factor(self) -> float:
        """T²."""
        return self.temperature**2

    def measure(self, loss: Callable[[LossSettings], LossSums], at_1: Sequence[str]) -> LossSums:
        """Return a loss by these settings; of the sums, an evaluation takes those named `at_1` at temperature 1.

        An evaluation of a draft whose T is not 1 costs a second pass, without gradients.
        """
        found = loss(self)
        if self.temperature == 1 or not self.evaluates:
            return found
        with torch.no_grad():
            judged = loss(replace(self, temperature=1.0, ctx=replace(self.ctx, served=())))
        return LossSums(found.loss, found.sums | {name: judged.sums[name] for name in at_1})


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature; at 1 the tensor itself, without a pass over it."""
    return logits if temperature == 1 else logits / temperature


def _by_step(weights: tuple[float, ...], steps: Tensor, like: Tensor) -> Tensor:
    """Return weights[step] of every label, (n,)."""
    return torch.tensor(weights, dtype=like.dtype, device=like.device)[steps]


def _as_floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def token_mean_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """Label mask of the chains a server would take: step i at position t counts iff mask[t+1 … t+2+i] are all on.

    The first proposal of an answer is made at the last prompt position t, after the target itself produced token t+1; a
    later proposal is worth something only while all tokens before it belong to the answer. So positions before t and
    labels beyond the end of an answer do not count, and what counts at step i counts at every earlier step.

    Args:
        loss_mask: (B, S) bool, True where a token is the assistant's; False in padding.
        documents: the documents of its rows; None where each row is one document.

    Returns:
        (steps, B, S) bool.
    """
    documents = documents or _one_each(loss_mask)
    chain = documents.shift_left(loss_mask, 1)
    masks = []
    for step in range(steps):
        chain = chain & documents.shift_left(loss_mask, 2 + step)
        masks.append(chain)
    return torch.stack(masks)


def specforge_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """SpecForge's label mask (steps, B, S): step i at position t counts iff mask[t+i] is on.

    The last position of each sample must be off already. SpecForge does not shift the mask with the labels: the first
    two tokens of an answer are never labels, and two tokens after its end are.
    """
    documents = documents or _one_each(loss_mask)
    return torch.stack([documents.shift_left(loss_mask, step) for step in range(steps)])


def _one_each(mask: Tensor) -> Documents:
    """Documents of a batch in which every row is one document."""
    return Documents.from_lengths((mask.shape[1],), mask.device)


class TeacherPlan(NamedTuple):
    """Which draft positions each teacher position teaches, over the flattened batch (N = B·S).

    Attributes:
        teacher_positions: (P,) flat positions whose teacher distribution some step needs, ascending.
        draft_positions: (T, P) flat position that step i trains on that distribution, or -1 where the label mask is
            off.
    """

    teacher_positions: Tensor
    draft_positions: Tensor


def mark_taught(label_mask: Tensor) -> Tensor:
    """Return a label mask (T, B, S) at the positions of its teachers: t+1+i instead of the draft's position t at step i."""
    length = label_mask.shape[2]
    return torch.stack([F.pad(mask, (1 + step, 0), value=False)[:, :length] for step, mask in enumerate(label_mask)])


def make_teacher_plan(label_mask: Tensor) -> TeacherPlan:
    """Group a label mask (T, B, S) by teacher position, so that each distribution is computed once for all steps."""
    steps = len(label_mask)
    taught = mark_taught(label_mask).view(steps, -1)  # (T, N)
    positions = taught.any(0).nonzero().squeeze(1)  # (P,)
    offsets = torch.arange(1, steps + 1, device=label_mask.device)[:, None]
    draft_positions = torch.where(taught[:, positions], positions[None] - offsets, -1)  # (T, P)
    return TeacherPlan(positions, draft_positions)


class TeacherChunk(NamedTuple):
    """Distributions and labels at m teacher positions.

    Attributes:
        kept: (n,) bool, which of the n positions asked for these are.
        q: (m, V_d), the target's distribution, renormalised over the draft vocabulary.
        labels: (m,) int64, the target's argmax as draft id; -1 outside the draft vocabulary.
        mass: (m,), the target's probability mass in the draft vocabulary; None if it was not asked for.
        served: (d, m, V_d), the target's probabilities of the draft vocabulary by each decoding; None without one.
    """

    kept: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None
    served: Tensor | None = None


class KnownArgmaxes(NamedTuple):
    """What spares a training the logits over the target's whole vocabulary.

    Attributes:
        ids: (N,) int64, the target's argmax at every position that is asked for.
        head: (V_d, H), the draft vocabulary's rows of the target's head.
    """

    ids: Tensor
    head: Tensor


class Teacher(NamedTuple):
    """The target's side of the loss.

    Attributes:
        last: (N, H) last hidden states, post-norm.
        head: (V, H), frozen.
        draft_ids: (V_d,) int64, target id of every draft id, ascending.
        draft_index: (V,) int64, draft id of every target id, -1 outside the draft vocabulary.
        known: None where the argmaxes are not known.
    """

    last: Tensor
    head: Tensor
    draft_ids: Tensor
    draft_index: Tensor
    known: KnownArgmaxes | None = None

    @torch.no_grad()
    def compute_distributions(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        with_mass: bool,
        with_unknown: bool,
        temperature: float = 1.0,
        served: Sequence[Decoding] = (),
    ) -> TeacherChunk:
        """Return the distributions at the positions (n,), in `dtype`.

        The head runs in its own dtype, as in the target itself, so that the target's argmax is reproduced.

        Args:
            temperature: that its logits are divided by.
            with_unknown: keep positions whose label is outside the draft vocabulary; otherwise they are left out.
            served: decodings whose probabilities are wanted too; only with `with_unknown`.
        """
        if self.known is not None and not with_unknown and not with_mass:
            return self._compute_known(positions, self.known, dtype, temperature)
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)  # (n, V)
        labels = self.draft_index[find_argmax(logits)]  # (n,)
        restricted = logits[:, self.draft_ids]  # (n, V_d)
        kept = labels >= 0
        if with_unknown:
            kept = torch.ones_like(kept)
        elif not kept.all():
            logits, restricted, labels = logits[kept] if with_mass else logits, restricted[kept], labels[kept]
        restricted = soften(restricted.to(dtype), temperature)
        mass = None
        if with_mass:
            mass = restricted.logsumexp(-1).sub_(soften(logits.to(dtype), temperature).logsumexp(-1)).exp_()
        probabilities = find_served_targets(logits.to(dtype), served, self.draft_ids) if served else None
        return TeacherChunk(kept, restricted.softmax(-1), labels, mass, probabilities)

    def _compute_known(
        self, positions: Tensor, known: KnownArgmaxes, dtype: torch.dtype, temperature: float
    ) -> TeacherChunk:
        """Return the chunk of those of the positions (n,) whose argmax is in the draft vocabulary."""
        labels = self.draft_index[known.ids[positions]]  # (n,)
        kept = labels >= 0
        states = self.last[positions[kept]].to(known.head.dtype)  # (m, H)
        logits = soften(F.linear(states, known.head).to(dtype), temperature)  # (m, V_d)
        return TeacherChunk(kept, logits.softmax(-1), labels[kept], mass=None)
