"""Distillation of the target's next-token distributions over a reduced vocabulary (EAGLE-3, P-EAGLE).

A formula of the logits, on the wrapper of draftworks.drafts.logit_losses: a chunk is some teacher positions, with the labels
of all steps that they teach. So a distribution is computed once for all steps, and no logits outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, chunked_loss, compare_teacher, find_argmax
from draftworks.drafts.objectives import (
    BatchObjective,
    CrossEntropy,
    LossSettings,
    Objective,
    Teacher,
    TeacherChunk,
    TeacherPlan,
    soften,
)
from draftworks.drafts.sampling import measure_acceptance, name_served_sums
from draftworks.drafts.strategy import StepContext

CHUNK_ELEMENTS = 2**20
"""Logits held at a time, the larger number of the teacher's and the draft's; at least MIN_CHUNK_LABELS labels."""
MIN_CHUNK_LABELS = 64
GPU_CHUNK_LABELS = 2048
"""Labels at a time on a GPU, at least: matrix products of fewer would not fill it."""


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
    settings: LossSettings,
) -> LossSums:
    """Return the objective over every supervised state against its teacher; loss = Σ_i step_weights[i]·loss_sums[i].

    The sums by step, (T,) each. A label outside the draft vocabulary is in the last two alone:

    * `loss_sums` of the objective; `acc_corrects`, labels that are the draft's argmax;
    * `acceptance_denoms`, labels inside the draft vocabulary, and `acceptance_sums`, Σ α over these (see
      draftworks.drafts.objectives), at temperature 1 in evaluations, else at that of the loss. In training only where the
      objective needs it, because it costs a pass over the teacher's logits.
    * in evaluations: `unconditional_acceptance_sums`, Σ α, and what servers accept by each of `settings.served`.

    Args:
        states: (Q, H) of all steps, what the draft's head is applied to.
        head: (V_d, H), the draft's head.
        plan: which states are taught by which rows of `teacher.last`.
        objective: a `BatchObjective` costs a second pass, which takes its means beforehand.
    """

    def run(settings: LossSettings, objective: Objective, with_mass: bool) -> LossSums:
        return _distill(states, head, teacher, plan, step_weights, objective, settings, with_mass)

    if isinstance(objective, BatchObjective):
        with torch.no_grad():
            means = run(replace(settings, ctx=StepContext(training=True)), CrossEntropy(), with_mass=True).sums
        objective = objective.for_batch(means["acceptance_sums"], means["acceptance_denoms"])
    with_mass = objective.needs_acceptance or settings.evaluates
    judged = ("acceptance_sums", "unconditional_acceptance_sums")
    return settings.measure(lambda each: run(each, objective, with_mass), judged)


def make_metric_sums(found: LossSums, supervised: Tensor) -> dict[str, Tensor]:
    """Return the sums of `StepOutput` from those of `distill`, for (T,) supervised positions of each step."""
    sums, without = dict(found.sums), () if "acceptance_sums" in found.sums else ("acceptance_denoms",)
    denoms = {f"{name.removesuffix('_sums')}_denoms": supervised for name in sums if name.endswith("_sums")}
    sums = denoms | {"acc_denoms": supervised} | sums
    return {name: each for name, each in sums.items() if name not in without}


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
    settings: LossSettings,
    with_mass: bool,
) -> LossSums:
    temperature, with_unknown, decodings = settings.temperature, settings.evaluates, settings.served
    wide = torch.promote_types(head.dtype, torch.float32)
    weights = torch.tensor(step_weights, dtype=wide, device=head.device)  # (T,)

    def formula(chunk: DistillationChunk, states: Tensor, head: Tensor) -> LossSums:
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

        sums = {"loss_sums": by_step(losses), "acc_corrects": by_step(correct), "acceptance_denoms": by_step(known)}
        if chunk.mass is not None:
            sums["acceptance_sums"] = by_step(acceptance * known)
        if with_unknown:
            sums["unconditional_acceptance_sums"] = by_step(acceptance)
        if served is not None:
            sums |= name_served_sums(decodings, by_step(served))
        return LossSums(torch.dot(weights[chunk.steps], losses), sums)

    def teach(positions: Tensor) -> TeacherChunk:
        return teacher.compute_distributions(positions, wide, with_mass, with_unknown, temperature, decodings)

    widest = teacher.head if teacher.known is None else teacher.known.head
    chunks = _split_into_chunks(teach, len(widest), plan, head)
    return chunked_loss(formula, chunks, [states], [head])


def _split_into_chunks(
    teach: Callable[[Tensor], TeacherChunk], teacher_width: int, plan: TeacherPlan, head: Tensor
) -> Iterator[DistillationChunk]:
    """Yield chunks of teacher positions, of whose logits there are `teacher_width` each; at least one, which may be empty."""
    steps, count = plan.draft_positions.shape
    fewest = GPU_CHUNK_LABELS if head.is_cuda else MIN_CHUNK_LABELS
    at_once = CHUNK_ELEMENTS // max(teacher_width, steps * head.shape[0])
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
