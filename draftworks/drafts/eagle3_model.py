"""The EAGLE-3 draft model: one decoder layer over three fused taps of the target, unrolled on its own outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotary, Rotation, seeded_linear
from draftworks.drafts.losses import Distilled, Teacher, distill
from draftworks.drafts.rows import ActiveRows
from draftworks.drafts.supervision import teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.drafts.ttt_attention import per_query_head, ttt_attention

Say = Callable[[Tensor], Tensor]


class Eagle3Sizes(NamedTuple):
    """Sizes of the draft layer; the rest is the target's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int = 3


class Heads(NamedTuple):
    """Query, key and value, each (B, its heads, S, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


class ProjectionHalves(NamedTuple):
    """The joint q, k, v projection for tokens and for states, each (all heads · D, H)."""

    tokens: Tensor
    states: Tensor


class Eagle3Attention(nn.Module):
    """Attention whose projections read tokens and states side by side: (…, 2H) = [embedding, hidden state]."""

    def __init__(self, target: TargetParts, sizes: Eagle3Sizes, generator: torch.Generator) -> None:
        super().__init__()
        width, self.head_dim = target.hidden_size, target.head_dim
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.q_proj = seeded_linear(2 * width, sizes.num_heads * self.head_dim, generator)
        self.k_proj = seeded_linear(2 * width, sizes.num_kv_heads * self.head_dim, generator)
        self.v_proj = seeded_linear(2 * width, sizes.num_kv_heads * self.head_dim, generator)
        self.o_proj = seeded_linear(sizes.num_heads * self.head_dim, width, generator)

    def halves(self) -> ProjectionHalves:
        """q, k and v as one matrix, cut into the columns that read tokens and those that read states."""
        joint = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        return ProjectionHalves(*joint.chunk(2, dim=1))

    def attend(self, heads: Heads) -> Tensor:
        """Plain attention of few queries over all of the keys: (B, S, heads · D)."""
        out = F.scaled_dot_product_attention(*heads, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def heads(self, joint: Tensor, rotation: Rotation) -> Heads:
        """Split (B, S, all heads · D) into heads; rotate queries and keys."""
        heads = joint.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return Heads(rotation.apply(query), rotation.apply(key), value)


class Eagle3Layer(nn.Module):
    """The decoder layer. Its residual stream is the un-normed hidden state, which also feeds the next step."""

    def __init__(self, target: TargetParts, sizes: Eagle3Sizes, generator: torch.Generator) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = Eagle3Attention(target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.hidden_norm = RmsNorm(width, eps)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def unroll(
        self, embedded: Tensor, hidden: Tensor, rotation: Rotation, steps: int, active: ActiveRows
    ) -> Iterator[Tensor]:
        """Hidden states (R, H) of the active rows, step after step, on tokens that are known beforehand.

        Step i reads the tokens from i on, so what the projections make of a token serves all steps. Other rows
        matter only for the keys and values of step 0.

        Args:
            embedded: (B, ≥ S + steps - 1, H), tokens from step 0's first on.
            hidden: (B, S, H), input of step 0.
            rotation: ≥ S + steps - 1 positions.
        """
        halves, length = self.self_attn.halves(), hidden.shape[1]
        tokens = F.linear(self.input_layernorm(embedded), halves.tokens)

        def known(step: int, _: Tensor) -> Tensor:
            return active.take(tokens[:, step : step + length])

        yield from self._steps(halves, tokens[:, :length], hidden, rotation, steps, active, known)

    def run_free(
        self, embedded: Tensor, hidden: Tensor, rotation: Rotation, steps: int, active: ActiveRows, say: Say
    ) -> None:
        """The same on the draft's own words.

        Args:
            embedded: (B, S, H), tokens of step 0.
            say: from the hidden states of a step (R, H) to the embeddings (R, H) of what they propose, which the
                next step reads. Called `steps` times.
        """
        halves = self.self_attn.halves()
        tokens = F.linear(self.input_layernorm(embedded), halves.tokens)

        def said(step: int, hidden: Tensor) -> Tensor:
            return F.linear(self.input_layernorm(say(hidden)), halves.tokens)

        *_, last = self._steps(halves, tokens, hidden, rotation, steps, active, said)
        say(last)

    def _steps(
        self,
        halves: ProjectionHalves,
        tokens: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        steps: int,
        active: ActiveRows,
        next_tokens: Callable[[int, Tensor], Tensor],
    ) -> Iterator[Tensor]:
        """`next_tokens`: from a step's number and the states before it to its tokens, projected, (R, all heads · D)."""
        length = hidden.shape[1]
        joint = F.linear(self.hidden_norm(hidden), halves.states) + tokens
        hidden = active.take(hidden)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            if step > 0:
                own = F.linear(self.hidden_norm(hidden), halves.states)
                joint = active.spread(own + next_tokens(step, hidden))
            heads = self.self_attn.heads(joint, rotation.window(step, length))
            keys.append(heads.key if step == 0 else per_query_head(heads.key, self.self_attn.num_heads))
            values.append(heads.value if step == 0 else per_query_head(heads.value, self.self_attn.num_heads))
            attended = ttt_attention(heads.query, keys, values).transpose(1, 2).flatten(2)
            hidden = hidden + self.self_attn.o_proj(active.take(attended))
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            yield hidden


class Eagle3Draft(nn.Module):
    """The trainable draft. Embedding and head of the target are buffers outside the checkpoint.

    Args:
        draft_ids: (V_d,) int64 ascending, target ids that the draft's head predicts.
        generator: the only source of randomness of the initial weights; `lm_head` begins as the target's rows.
    """

    def __init__(self, target: TargetParts, sizes: Eagle3Sizes, draft_ids: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        width = target.hidden_size
        self.fc = seeded_linear(sizes.taps * width, width, generator)
        self.midlayer = Eagle3Layer(target, sizes, generator)
        self.norm = RmsNorm(width, target.rms_norm_eps)
        self.lm_head = nn.utils.skip_init(nn.Linear, width, draft_ids.numel(), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[draft_ids])
        self.rotary = Rotary(target)
        in_draft = torch.zeros(target.vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(draft_ids.numel()))
        self.register_buffer("t2d", in_draft)
        self.register_buffer("embed_tokens", target.embedding, persistent=False)
        self.register_buffer("own_target_head", None if target.tied else target.head, persistent=False)

    @property
    def draft_ids(self) -> Tensor:
        """(V_d,) int64: the target's ids of what `lm_head` predicts."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of the target in the draft's dtype."""
        return F.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    @torch.no_grad()
    def propose(self, input_ids: Tensor, features: Tensor, rows: Tensor, count: int) -> Tensor:
        """Greedy chains from many rows at once, each as a server would make it there.

        Args:
            rows: (B, S) bool: row t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 in other rows.
        """
        active, length = ActiveRows.where(rows), input_ids.shape[1]
        draft_ids, said = self.draft_ids, []

        def say(hidden: Tensor) -> Tensor:
            said.append(draft_ids[self.lm_head(self.norm(hidden)).argmax(-1)])
            return self.embed(said[-1])

        first = self.embed(F.pad(input_ids[:, 1:], (0, 1)))
        rotation = self.rotary(length + count, first.dtype)
        self.midlayer.run_free(first, self.fc(features.to(first.dtype)), rotation, count, active, say)
        proposals = input_ids.new_full((input_ids.numel(), count), -1)
        proposals[active.index] = torch.stack(said, dim=-1)
        return proposals.unflatten(0, input_ids.shape)

    @property
    def target_head(self) -> Tensor:
        return self.embed_tokens if self.own_target_head is None else self.own_target_head

    def unroll(self, input_ids: Tensor, features: Tensor, steps: int, active: ActiveRows) -> list[Tensor]:
        """Normed hidden states of every step, (R, H) each: what `lm_head` is applied to.

        Args:
            input_ids: (B, S). Step i at row t sees token t+1+i; beyond the end of the batch, token 0.
            features: (B, S, 3H), the taps in ascending order.
            active: rows whose states are wanted.
        """
        dtype, length = self.fc.weight.dtype, input_ids.shape[1]
        ahead = F.pad(input_ids[:, 1:], (0, steps))
        embedded = F.embedding(ahead, self.embed_tokens).to(dtype)
        rotation = self.rotary(length + steps, dtype)
        hidden = self.fc(features.to(dtype))
        return [self.norm(state) for state in self.midlayer.unroll(embedded, hidden, rotation, steps, active)]

    def forward(
        self, input_ids: Tensor, features: Tensor, last: Tensor, gates: Tensor, step_weights: Sequence[float]
    ) -> Distilled:
        """Unroll and distil; one call per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
            gates: (T, B, S) bool, supervised rows of every step.
            step_weights: T factors on the steps' summed losses.
        """
        active = ActiveRows.where(gates.any(0))
        states = self.unroll(input_ids, features, gates.shape[0], active)
        draft_ids = self.draft_ids
        draft_index = torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)
        teacher = Teacher(last.flatten(0, 1), self.target_head, draft_ids, draft_index)
        plan = teacher_plan(gates)
        plan = plan._replace(rows=active.renumber(plan.rows))
        return distill(states, self.lm_head.weight, teacher, plan, step_weights)
