"""The decoder layer of EAGLE-3, and its unroll on its own outputs (test-time training).

Shapes: B batch rows of S positions; R of the B·S positions are active, those whose states are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotation, seeded_linear
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.attention import per_query_head, ttt_attention


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
