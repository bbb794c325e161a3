"""The EAGLE-3 draft model: one decoder layer over fused taps of the target, unrolled on its own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import ReducedVocabularyDraft, RmsNorm, Rotary, argmax_of_head, fuse_taps, seeded_linear
from draftworks.drafts.logit_losses import LossSums
from draftworks.drafts.objectives import BatchObjective, LossSettings, Objective
from draftworks.drafts.supervision import make_teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.layer import Eagle3AttentionOptions, Eagle3Layer, Eagle3Sizes, StepStates
from draftworks.strategies.eagle3.loss import distill, number_across_steps


class Eagle3Norms(NamedTuple):
    """Which states are normed. The defaults are EAGLE-3 as published.

    EAGLE-3.1 norms the taps and the state that is fed back; speculators' default norms all taps as one, the state that is fed
    back, and the initial residual stream.

    Attributes:
        fc_norm: each tap has a norm of its own before the taps are fused.
        norm_output: the head reads the normed state. If false, `norm` is unused and not trained; it stays in the
            checkpoint, as in SpecForge's, because every server loads the tensor.
        feedback: the state that the next step takes over. `pre_norm` is SpecForge, and the default of SGLang and vLLM;
            `post_norm` is what speculators, vLLM and later SGLangs call `norm_output: true`.
        norm_before_fc: all taps side by side have one norm before they are fused; not together with `fc_norm`.
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
    """

    embed_tokens: Tensor
    own_target_head: Tensor | None

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
        """Embed ids (…) to (…, H) as the target does, in the draft's dtype."""
        return F.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the input state of step 0, (…, H), from the taps side by side, ascending, (…, taps · H)."""
        if self.input_norm is not None:
            features = self.input_norm(features.to(self.fc.weight.dtype))
        return fuse_taps(features, self.fc_norm, self.fc)

    def finish_step(self, hidden: Tensor) -> StepStates:
        """Return the states of a finished step from its residual stream (…, H)."""
        if not self.norms.norm_output:
            return StepStates(hidden, hidden)
        output = self.norm(hidden)
        return StepStates(output, output if self.norms.feedback == "post_norm" else hidden)

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, features: Tensor, position_mask: Tensor, count: int, documents: Documents
    ) -> Tensor:
        """Return the greedy chain that a server would propose at each of many positions.

        Args:
            position_mask: (B, S) bool: position t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 at other positions.
        """
        active = ActivePositions.where(position_mask)
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
        """Return the output states of every step, (R, H) each, which `lm_head` is applied to.

        Args:
            input_ids: (B, S). Step i at position t reads token t+1+i; beyond the end of the document, token 0.
            features: (B, S, taps · H), the taps in ascending order.
            active: the R positions whose states are wanted.
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
        settings: LossSettings,
    ) -> LossSums:
        """Unroll and distil; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
            label_mask: (T, B, S) bool, the supervised positions of every step.
            step_weights: T weights of the steps' summed losses.
        """
        active = ActivePositions.where(label_mask.any(0))
        states = torch.cat(self.unroll(input_ids, features, label_mask.shape[0], active, documents))  # (T · R, H)
        teacher = self.teacher(last, self.target_head)
        plan = make_teacher_plan(label_mask)
        rows = [active.renumber(rows) for rows in plan.draft_positions]
        plan = plan._replace(draft_positions=number_across_steps(rows, [active.index.numel()] * len(rows)))
        return distill(states, self.lm_head.weight, teacher, plan, step_weights, objective, settings)
