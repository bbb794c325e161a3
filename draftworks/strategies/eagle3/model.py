"""The EAGLE-3 draft model: one decoder layer over fused taps of the target, unrolled on its own outputs (test-time training).

Shapes: B batch rows of S positions; R of the B·S positions are active, those whose states are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import (
    GatedMlp,
    ReducedVocabularyDraft,
    RmsNorm,
    Rotary,
    Rotation,
    argmax_of_head,
    fuse_taps,
    seeded_linear,
)
from draftworks.drafts.logit_losses import LossSums
from draftworks.drafts.objectives import BatchObjective, LossSettings, Objective, make_teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.attention import per_query_head, ttt_attention
from draftworks.strategies.eagle3.loss import distill, number_across_steps


class StepStates(NamedTuple):
    """Output of one step of the unroll, (…, H) each: `output` is for the draft's head, `carried` for the next step."""

    output: Tensor
    carried: Tensor


FinishStep = Callable[[Tensor], StepStates]
"""From the layer's residual stream after a step to the states that the step returns."""
EmbedProposals = Callable[[Tensor], Tensor]
"""From the output states of a step (R, H) to the embeddings (R, H) of the tokens that they propose."""


class Eagle3Sizes(NamedTuple):
    """Sizes of the draft layer; the others are the target's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int = 3


class Eagle3AttentionOptions(NamedTuple):
    """Back end and window of the layer's attention.

    Attributes:
        backend: of the unroll, see `ttt_attention`.
        window: number of positions of step 0 that a position sees, the last one its own; None for all.
    """

    backend: str = "auto"
    window: int | None = None


class Heads(NamedTuple):
    """Query (B, heads, S, D), key and value (B, kv_heads, S, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


class ProjectionHalves(NamedTuple):
    """The joint q, k, v projection, split into the columns for tokens and for states, (all heads · D, H) each."""

    tokens: Tensor
    states: Tensor


class Eagle3Attention(nn.Module):
    """Attention whose projections read [embedding, hidden state], (…, 2H)."""

    def __init__(self, target: TargetParts, sizes: Eagle3Sizes, generator: torch.Generator) -> None:
        super().__init__()
        width, self.head_dim = target.hidden_size, target.head_dim
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.q_proj = seeded_linear(2 * width, sizes.num_heads * self.head_dim, generator)
        self.k_proj = seeded_linear(2 * width, sizes.num_kv_heads * self.head_dim, generator)
        self.v_proj = seeded_linear(2 * width, sizes.num_kv_heads * self.head_dim, generator)
        self.o_proj = seeded_linear(sizes.num_heads * self.head_dim, width, generator)

    def split_halves(self) -> ProjectionHalves:
        """Return q, k and v as one matrix, split into the columns for tokens and those for states."""
        joint = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        return ProjectionHalves(*joint.chunk(2, dim=1))

    def attend(self, heads: Heads) -> Tensor:
        """Return plain attention of a few queries to all keys: (B, S, heads · D)."""
        out = F.scaled_dot_product_attention(*heads, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def split_heads(self, joint: Tensor, rotation: Rotation) -> Heads:
        """Split (B, S, all heads · D) into heads, and rotate queries and keys."""
        heads = joint.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return Heads(rotation.apply(query), rotation.apply(key), value)


class StepInputs(NamedTuple):
    """Input of a step, (…, H) each: the normed state, which attention reads, and the residual stream."""

    normed: Tensor
    residual: Tensor


class Eagle3Layer(nn.Module):
    """The decoder layer. The residual stream of a step begins as the state carried over from the step before.

    Args:
        norm_before_residual: the residual stream begins as that state, normed.
    """

    def __init__(
        self,
        target: TargetParts,
        sizes: Eagle3Sizes,
        generator: torch.Generator,
        attention: Eagle3AttentionOptions,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self._norm_before_residual = attention, norm_before_residual
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = Eagle3Attention(target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.hidden_norm = RmsNorm(width, eps)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def begin_step(self, hidden: Tensor) -> StepInputs:
        """Return the input of a step from the carried states (…, H)."""
        normed = self.hidden_norm(hidden)
        return StepInputs(normed, normed if self._norm_before_residual else hidden)

    def unroll(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        steps: int,
        active: ActivePositions,
        finish_step: FinishStep,
        documents: Documents,
    ) -> Iterator[Tensor]:
        """Yield the output states (R, H) of the active positions, step after step, on tokens that are known beforehand.

        Step i reads the tokens from i on, so the projection of a token is computed once for all steps. Positions that
        are not active matter only for the keys and values of step 0.

        Args:
            embedded: (B, S, H), tokens of step 0. The last one of each document is used in place of those beyond it,
                which no supervised position reads.
            hidden: (B, S, H), input of step 0.
            rotation: of as many positions as the longest document has, and steps - 1 more.
        """
        halves = self.self_attn.split_halves()
        tokens = F.linear(self.input_layernorm(embedded), halves.tokens)

        def project_known_tokens(step: int, _: Tensor) -> Tensor:
            return active.shift(step, documents).gather(tokens)

        yield from self._steps(
            halves, tokens, hidden, rotation, steps, active, finish_step, documents, project_known_tokens
        )

    def unroll_on_own_tokens(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        steps: int,
        active: ActivePositions,
        finish_step: FinishStep,
        documents: Documents,
        embed_proposals: EmbedProposals,
    ) -> None:
        """Unroll on the tokens that the draft itself proposes.

        Args:
            embedded: (B, S, H), tokens of step 0.
            embed_proposals: called with the output states of each step; the next step reads what it returns.
        """
        halves = self.self_attn.split_halves()
        tokens = F.linear(self.input_layernorm(embedded), halves.tokens)

        def project_proposals(step: int, output: Tensor) -> Tensor:
            return F.linear(self.input_layernorm(embed_proposals(output)), halves.tokens)

        *_, last = self._steps(
            halves, tokens, hidden, rotation, steps, active, finish_step, documents, project_proposals
        )
        embed_proposals(last)

    def _steps(
        self,
        halves: ProjectionHalves,
        tokens: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        steps: int,
        active: ActivePositions,
        finish_step: FinishStep,
        documents: Documents,
        next_tokens: Callable[[int, Tensor], Tensor],
    ) -> Iterator[Tensor]:
        """Yield the output states (R, H) of every step.

        Args:
            tokens: (B, S, all heads · D), projected tokens of step 0.
            next_tokens: from the number of a step and the output states before it to its projected tokens,
                (R, all heads · D).
        """
        normed, residual = self.begin_step(hidden)
        joint = F.linear(normed, halves.states) + tokens  # (B, S, all heads · D)
        output = residual = active.gather(residual)  # (R, H)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            if step > 0:
                normed, residual = self.begin_step(hidden)
                joint = active.scatter(
                    F.linear(normed, halves.states) + next_tokens(step, output)
                )  # (B, S, all heads · D)
            heads = self.self_attn.split_heads(joint, rotation.at(documents.positions + step))
            keys.append(heads.key if step == 0 else per_query_head(heads.key, self.self_attn.num_heads))
            values.append(heads.value if step == 0 else per_query_head(heads.value, self.self_attn.num_heads))
            attended = ttt_attention(heads.query, keys, values, documents, *self.attention)  # (B, heads, S, D)
            hidden = residual + self.self_attn.o_proj(active.gather(attended.transpose(1, 2).flatten(2)))
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            output, hidden = finish_step(hidden)
            yield output


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
        argmaxes: Tensor | None = None,
    ) -> LossSums:
        """Unroll and distil; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
            label_mask: (T, B, S) bool, the supervised positions of every step.
            step_weights: T weights of the steps' summed losses.
            argmaxes: (B·S,) int64, the target's argmax at the positions that teach, where it is known.
        """
        active = ActivePositions.where(label_mask.any(0))
        states = torch.cat(self.unroll(input_ids, features, label_mask.shape[0], active, documents))  # (T · R, H)
        teacher = self.teacher(last, self.target_head, argmaxes)
        plan = make_teacher_plan(label_mask)
        rows = [active.renumber(rows) for rows in plan.draft_positions]
        plan = plan._replace(draft_positions=number_across_steps(rows, [active.index.numel()] * len(rows)))
        return distill(states, self.lm_head.weight, teacher, plan, step_weights, objective, settings)
