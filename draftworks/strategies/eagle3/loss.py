"""Distillation of the target's next-token distributions over a reduced vocabulary (EAGLE-3, P-EAGLE).

A formula of the logits, on the wrapper of draftworks.drafts.logit_losses: a chunk is some teacher positions, with the labels
of all steps that they teach. So a distribution is computed once for all steps, and no logits outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.acceptance import measure_acceptance, name_served_sums
from draftworks.drafts.logit_losses import chunked_loss, compare_teacher, find_argmax
from draftworks.drafts.objectives import BatchObjective, CrossEntropy, Objective, Temperatures, soften
from draftworks.drafts.strategy import StepContext
from draftworks.drafts.supervision import Teacher, TeacherChunk, TeacherPlan

CHUNK_ELEMENTS = 2**20
"""Logits held at a time, the larger number of the teacher's and the draft's; at least MIN_CHUNK_LABELS labels."""
MIN_CHUNK_LABELS = 64
GPU_CHUNK_LABELS = 2048
"""Labels at a time on a GPU, at least: matrix products of fewer would not fill it."""


class DistillationLosses(NamedTuple):
    """`loss` = Σ_i step_weights[i]·loss_sums[i] is differentiable; the sums by step, (T,) float64, are not.

    A label outside the draft vocabulary adds to `accepted_all` only.

    Attributes:
        loss_sums: of the objective.
        corrects: labels that are the draft's argmax.
        taught: number of labels inside the draft vocabulary.
        accepted: Σ α, see draftworks.drafts.objectives; at temperature 1 in evaluations, else at that of the loss. None in
            training where the objective does not need it, because it costs a pass over the teacher's logits.
        accepted_all: Σ α, labels outside the draft vocabulary included; None in training.
        served: (d, T), Σ of what servers accept by each of `Temperatures.served`, over all labels; None without one.
    """

    loss: Tensor
    loss_sums: Tensor
    corrects: Tensor
    taught: Tensor
    accepted: Tensor | None
    accepted_all: Tensor | None
    served: Tensor | None = None

    def metric_sums(self, supervised: Tensor, ctx: StepContext) -> dict[str, Tensor]:
        """Return the sums of `StepOutput`, for (T,) supervised positions of each step."""
        sums = {
            "acc_corrects": self.corrects,
            "acc_denoms": supervised,
            "loss_sums": self.loss_sums,
            "loss_denoms": supervised,
        }
        if self.accepted is not None:
            sums |= {"acceptance_sums": self.accepted, "acceptance_denoms": self.taught}
        if self.accepted_all is not None:
            all_labels = {"acceptance_sums": self.accepted_all, "acceptance_denoms": supervised}
            sums |= {f"unconditional_{name}": each for name, each in all_labels.items()}
        return sums | name_served_sums(ctx, self.served, supervised)


@dataclass(frozen=True)
class DistillationChunk:
    """The n labels that some m teacher positions teach.

    Attributes:
        index: (n,) int64, the draft's states that the labels belong to.
        steps: (n,) int64, the step of each label.
        q: (n, V_d), the teacher's distribution.
        labels: (n,) int64 draft ids, -1 outside the draft vocabulary.
        mass: (n,), the teacher's probability mass in the draft vocabulary, or None.
        served: (d, n, V_d), the target's probabilities by each decoding of a server, or None.
    """

    index: Tensor
    steps: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None
    served: Tensor | None


def distill(
    states: Tensor,
    head: Tensor,
    teacher: Teacher,
    plan: TeacherPlan,
    step_weights: Sequence[float],
    objective: Objective | BatchObjective,
    temperatures: Temperatures,
) -> DistillationLosses:
    """Return the objective over every supervised state against its teacher.

    An evaluation of a draft whose T is not 1 costs a second pass over the logits.

    Args:
        states: (Q, H) of all steps, what the draft's head is applied to.
        head: (V_d, H), the draft's head.
        plan: which states are taught by which rows of `teacher.last`.
        objective: a `BatchObjective` costs a second pass, which takes its means beforehand.
    """
    sides, evaluates = (states, head, teacher, plan, step_weights), temperatures.evaluates
    if isinstance(objective, BatchObjective):
        with torch.no_grad():
            means = _distill(*sides, CrossEntropy(), Temperatures(temperatures.teacher), with_mass=True)
        assert means.accepted is not None, "asked for with the mass"
        objective = objective.for_batch(means.accepted, means.taught)
    trained = _distill(*sides, objective, temperatures, with_mass=objective.needs_acceptance or evaluates)
    if not evaluates:
        return trained
    at_1 = temperatures.judge(trained, lambda each: _distill(*sides, CrossEntropy(), each, with_mass=True))
    return trained._replace(accepted=at_1.accepted, accepted_all=at_1.accepted_all)


def number_across_steps(rows: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return (T, P) indices into the states of all steps one after another, from those within each step; -1 stays -1."""
    begins = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
    return torch.stack([torch.where(each >= 0, each + begin, -1) for each, begin in zip(rows, begins, strict=True)])


def _distill(
    states: Tensor,
    head: Tensor,
    teacher: Teacher,
    plan: TeacherPlan,
    step_weights: Sequence[float],
    objective: Objective,
    temperatures: Temperatures,
    with_mass: bool,
) -> DistillationLosses:
    temperature, with_unknown, decodings = temperatures.teacher, temperatures.evaluates, temperatures.served
    wide = torch.promote_types(head.dtype, torch.float32)
    weights = torch.tensor(step_weights, dtype=wide, device=head.device)  # (T,)

    def formula(chunk: DistillationChunk, states: Tensor, head: Tensor) -> DistillationLosses:
        logits = F.linear(states, head).to(wide)  # (n, V_d)
        correct = find_argmax(logits) == chunk.labels
        served = None if chunk.served is None else measure_acceptance(logits, chunk.served, decodings)  # (d, n)
        ce, overlap = compare_teacher(soften(logits, temperature), chunk.q, chunk.mass)  # (n,) each
        acceptance = torch.zeros_like(ce) if overlap is None else overlap
        known = chunk.labels >= 0
        losses = temperature**2 * objective.label_losses(ce, acceptance, chunk.steps)
        if with_unknown:
            losses = losses * known

        def by_step(values: Tensor) -> Tensor:
            sums = torch.zeros(*values.shape[:-1], len(weights), dtype=torch.float64, device=values.device)
            return sums.index_add_(-1, chunk.steps, values.detach().double())

        return DistillationLosses(
            loss=torch.dot(weights[chunk.steps], losses),
            loss_sums=by_step(losses),
            corrects=by_step(correct),
            taught=by_step(known),
            accepted=None if chunk.mass is None else by_step(acceptance * known),
            accepted_all=by_step(acceptance) if with_unknown else None,
            served=None if served is None else by_step(served),
        )

    def teach(positions: Tensor) -> TeacherChunk:
        return teacher.compute_distributions(positions, wide, with_mass, with_unknown, temperature, decodings)

    chunks = _split_into_chunks(teach, teacher.head, plan, head)
    return chunked_loss(formula, chunks, [states], [head])


def _split_into_chunks(
    teach: Callable[[Tensor], TeacherChunk], target_head: Tensor, plan: TeacherPlan, head: Tensor
) -> Iterator[DistillationChunk]:
    """Yield chunks of teacher positions; at least one, which may be empty."""
    steps, count = plan.draft_positions.shape
    fewest = GPU_CHUNK_LABELS if head.is_cuda else MIN_CHUNK_LABELS
    at_once = CHUNK_ELEMENTS // max(target_head.shape[0], steps * head.shape[0])
    at_once = max(1, -(-fewest // steps), at_once)
    for start in range(0, max(count, 1), at_once):
        part = slice(start, start + at_once)
        taught = teach(plan.teacher_positions[part])
        rows = plan.draft_positions[:, part][:, taught.kept]  # (T, m)
        step, position = (rows >= 0).nonzero(as_tuple=True)  # (n,), (n,)
        yield DistillationChunk(
            index=rows[step, position],
            steps=step,
            q=taught.q.index_select(0, position),
            labels=taught.labels[position],
            mass=None if taught.mass is None else taught.mass[position],
            served=None if taught.served is None else taught.served.index_select(1, position),
        )
