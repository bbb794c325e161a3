"""The EAGLE-3 draft model: one decoder layer over fused taps of the target, unrolled on its own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import ReducedVocabularyDraft, RmsNorm, Rotary, argmax_of_head, fuse_taps, seeded_linear
from draftworks.drafts.objectives import BatchObjective, Objective
from draftworks.drafts.supervision import make_teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.layer import Eagle3AttentionOptions, Eagle3Layer, Eagle3Sizes, StepStates
from draftworks.strategies.eagle3.loss import DistillationLosses, distill, number_across_steps


class Eagle3Norms(NamedTuple):
    """Which states are normed: EAGLE-3 as published by default; EAGLE-3.1 norms the taps and what is fed back, and
    speculators by default norms them all as one, what is fed back, and what the residual stream begins with.

    Attributes:
        fc_norm: each tap by a norm of its own, before they are fused.
        norm_output: what the head reads. Without it `norm` is never read: it stays in the checkpoint, as in SpecForge's
            and because every server has the tensor, but is not trained.
        feedback: what the next step takes over. `pre_norm`: SpecForge, and SGLang and vLLM by default; `post_norm`:
            what speculators, vLLM and later SGLangs call `norm_output: true`.
        norm_before_fc: all taps side by side by one norm, before they are fused; not together with `fc_norm`.
        norm_before_residual: the layer's residual stream begins with the normed state.
    """

    fc_norm: bool = False
    norm_output: bool = True
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    norm_before_fc: bool = False
    norm_before_residual: bool = False


class Eagle3Draft(ReducedVocabularyDraft):
    """The trainable draft. Embedding and head of the target are buffers outside the checkpoint.

    Args:
        draft_ids: (V_d,) int64 ascending, target ids that the draft's head predicts.
        generator: the only source of randomness of the initial weights; `lm_head` begins as the target's rows.
        attention: how the layer attends, see `Eagle3AttentionOptions`.
    """

    def __init__(
        self,
        target: TargetParts,
        sizes: Eagle3Sizes,
        draft_ids: Tensor,
        generator: torch.Generator,
        norms: Eagle3Norms,
        attention: Eagle3AttentionOptions,
    ) -> None:
        super().__init__()
        width, self.norms = target.hidden_size, norms
        normed_taps = sizes.taps if norms.fc_norm else 0
        self.fc_norm = nn.ModuleList(RmsNorm(width, target.rms_norm_eps) for _ in range(normed_taps))
        self.input_norm = RmsNorm(sizes.taps * width, target.rms_norm_eps) if norms.norm_before_fc else None
        self.fc = seeded_linear(sizes.taps * width, width, generator)
        self.midlayer = Eagle3Layer(target, sizes, generator, attention, norms.norm_before_residual)
        self.norm = RmsNorm(width, target.rms_norm_eps).requires_grad_(norms.norm_output)
        self._init_head(draft_ids, target)
        self.rotary = Rotary(target)
        self.register_buffer("embed_tokens", target.embedding, persistent=False)
        self.register_buffer("own_target_head", None if target.tied else target.head, persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of the target in the draft's dtype."""
        return F.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """From the taps side by side (…, taps · H), ascending, to the state that step 0 begins with (…, H)."""
        if self.input_norm is not None:
            features = self.input_norm(features.to(self.fc.weight.dtype))
        return fuse_taps(features, self.fc_norm, self.fc)

    def finish_step(self, hidden: Tensor) -> StepStates:
        """What a step hands on, from its residual stream (…, H)."""
        if not self.norms.norm_output:
            return StepStates(hidden, hidden)
        output = self.norm(hidden)
        return StepStates(output, output if self.norms.feedback == "post_norm" else hidden)

    @torch.no_grad()
    def propose(self, input_ids: Tensor, features: Tensor, rows: Tensor, count: int, documents: Documents) -> Tensor:
        """Greedy chains from many rows at once, each as a server would make it there.

        Args:
            rows: (B, S) bool: row t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 in other rows.
        """
        active = ActivePositions.where(rows)
        draft_ids, proposed = self.draft_ids, []

        def embed_proposals(output: Tensor) -> Tensor:
            proposed.append(draft_ids[argmax_of_head(self.lm_head.weight, output)])
            return self.embed(proposed[-1])

        first = self.embed(documents.shift_left(input_ids, 1))
        rotation = self.rotary(documents.longest + count, first.dtype)
        self.midlayer.unroll_on_own_tokens(
            first, self.fuse(features), rotation, count, active, self.finish_step, documents, embed_proposals
        )
        proposals = input_ids.new_full((input_ids.numel(), count), -1)
        proposals[active.index] = torch.stack(proposed, dim=-1)
        return proposals.unflatten(0, input_ids.shape)

    @property
    def target_head(self) -> Tensor:
        return self.embed_tokens if self.own_target_head is None else self.own_target_head

    def unroll(
        self, input_ids: Tensor, features: Tensor, steps: int, active: ActivePositions, documents: Documents
    ) -> list[Tensor]:
        """Spoken states of every step, (R, H) each: what `lm_head` is applied to.

        Args:
            input_ids: (B, S). Step i at row t sees token t+1+i; beyond the end of the document, token 0.
            features: (B, S, taps · H), the taps in ascending order.
            active: rows whose states are wanted.
        """
        first = self.embed(documents.shift_left(input_ids, 1))
        rotation = self.rotary(documents.longest + steps, first.dtype)
        return list(
            self.midlayer.unroll(first, self.fuse(features), rotation, steps, active, self.finish_step, documents)
        )

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        last: Tensor,
        label_mask: Tensor,
        step_weights: Sequence[float],
        objective: Objective | BatchObjective,
        documents: Documents,
        training: bool,
    ) -> DistillationLosses:
        """Unroll and distil; one call per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
            label_mask: (T, B, S) bool, supervised rows of every step.
            step_weights: T factors on the steps' summed losses.
        """
        active = ActivePositions.where(label_mask.any(0))
        states = torch.cat(self.unroll(input_ids, features, label_mask.shape[0], active, documents))  # (T · R, H)
        teacher = self.teacher(last, self.target_head)
        plan = make_teacher_plan(label_mask)
        rows = [active.renumber(rows) for rows in plan.draft_positions]
        plan = plan._replace(draft_positions=number_across_steps(rows, [active.index.numel()] * len(rows)))
        return distill(states, self.lm_head.weight, teacher, plan, step_weights, objective, training)
