"""The P-EAGLE draft model: EAGLE-3's rows, after each of them masks for what follows, and all that in one pass.

As speculators and SpecForge train it and vLLM serves it. Row a knows the target's features up to a and its tokens up to a + 1.
At depth 0 it reads embed(token a + 1) and fc(features a); at depth d ≥ 1 embed(mask token) and fc(mask_hidden), at the rotary
position a + d. The state of depth d, normed and through `lm_head`, proposes token a + 2 + d. A row at depth 0 sees depth 0 of its
document up to itself, as at the first step of `ttt_attention`; a row at depth d sees what its anchor sees, and of its own chain the
depths 1 … d (`Chains.make_seen_keys`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.attention import DraftAttention, KeyValue
from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import (
    GatedMlp,
    ReducedVocabularyDraft,
    RmsNorm,
    Rotary,
    argmax_of_head,
    fuse_taps,
    seeded_linear,
    uninitialized,
)
from draftworks.drafts.objectives import CrossEntropy
from draftworks.drafts.supervision import make_teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.attention import ttt_attention
from draftworks.strategies.eagle3.loss import DistillationLosses, distill, number_across_steps
from draftworks.strategies.peagle.chains import Chains, TokensByDepth


class PEagleSizes(NamedTuple):
    """Sizes of the draft; the rest is the target's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int
    num_layers: int
    mask_token_id: int


class TokenLayout(ABC):
    """What a layer is applied to: knows which of its rows look at which."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of projected rows (n, heads · width) with rotary positions: (T, heads · width)."""

    @abstractmethod
    def expand_states(self, x: Tensor) -> Tensor:
        """The states of all rows (T, H) from those that a layer was given (n, H)."""


class TrainingLayout(TokenLayout):
    """The N rows of a batch, then the R masked ones of its chains.

    All masks begin alike, so the first layer is given one for all of them, n = N + 1. Later ones get T = N + R.

    Args:
        width: of a head.
        backend: of both attentions, see `ttt_attention` and draftworks.drafts.attention.
    """

    def __init__(self, chains: Chains, rotary: Rotary, width: int, dtype: torch.dtype, backend: str) -> None:
        self._chains, self._width, self._backend = chains, width, backend
        table = rotary(chains.documents.longest + chains.limit, dtype)
        self._at_batch = table.at(chains.documents.positions)
        self._at_chains = table.at(chains.positions)
        self._attend_chains = DraftAttention(chains.make_seen_keys(), backend, "peagle")

    @torch.compiler.disable  # how many chains there are is new in every batch
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [self._masked(x)[None].transpose(1, 2) for x in (query, key, value)]
        query, key, value = (self._batched(x).transpose(1, 2) for x in (query, key, value))
        query, key = self._at_batch.apply(query), self._at_batch.apply(key)
        attended = ttt_attention(query, [key], [value], self._chains.documents, self._backend)
        rows = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        context = KeyValue(_in_one_row(key), _in_one_row(value))
        own_query, own_key = self._at_chains.apply(own[0]), self._at_chains.apply(own[1])
        masked = self._attend_chains(own_query, context, KeyValue(own_key, own[2]))
        return torch.cat([rows, masked[0].transpose(0, 1).flatten(1)])

    @torch.compiler.disable
    def expand_states(self, x: Tensor) -> Tensor:
        count = self._chains.batch * self._chains.length
        return torch.cat([x[:count], x[count:].expand(self._chains.count, -1)])

    def _batched(self, x: Tensor) -> Tensor:
        """(n, heads · width) to (B, S, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[:count].unflatten(0, (self._chains.batch, -1)).unflatten(-1, (-1, self._width))

    def _masked(self, x: Tensor) -> Tensor:
        """(n, heads · width) to (R, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[count:].expand(self._chains.count, -1).unflatten(-1, (-1, self._width))


def _in_one_row(heads: Tensor) -> Tensor:
    """(B, heads, S, width) to (1, heads, B·S, width)."""
    return heads.transpose(0, 1).flatten(1, 2)[None]


class PEagleAttention(nn.Module):
    def __init__(self, inputs: int, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator) -> None:
        super().__init__()
        width = target.head_dim
        self.q_proj = seeded_linear(inputs, sizes.num_heads * width, generator)
        self.k_proj = seeded_linear(inputs, sizes.num_kv_heads * width, generator)
        self.v_proj = seeded_linear(inputs, sizes.num_kv_heads * width, generator)
        self.o_proj = seeded_linear(sizes.num_heads * width, target.hidden_size, generator)


class PEagleLayer(nn.Module):
    """A Llama layer over rows (n, H)."""

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, reads_tokens: bool = False
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = PEagleAttention(2 * width if reads_tokens else width, target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def forward(self, hidden: Tensor, rows: TokenLayout, wanted: ActivePositions | None = None) -> Tensor:
        """States (T, H) of all rows, or of those that are wanted, from what they were (n, H)."""
        return self._over(self.input_layernorm(hidden), hidden, rows, wanted)

    def _over(self, read: Tensor, residual: Tensor, rows: TokenLayout, wanted: ActivePositions | None) -> Tensor:
        attention = self.self_attn
        attended = rows.attend(attention.q_proj(read), attention.k_proj(read), attention.v_proj(read))
        residual = rows.expand_states(residual)
        if wanted is not None:
            attended, residual = wanted.gather(attended[None]), wanted.gather(residual[None])
        hidden = residual + attention.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PEagleFirstLayer(PEagleLayer):
    """Reads [token, state], each normed by itself. The residual stream begins as the state.

    Args:
        norm_before_residual: it begins as the normed state.
    """

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, norm_before_residual: bool
    ) -> None:
        super().__init__(target, sizes, generator, reads_tokens=True)
        self.hidden_norm = RmsNorm(target.hidden_size, target.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(
        self, hidden: Tensor, embedded: Tensor, rows: TokenLayout, wanted: ActivePositions | None = None
    ) -> Tensor:
        """As of the other layers, with the tokens' embeddings (n, H)."""
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self._over(read, normed if self._norm_before_residual else hidden, rows, wanted)


PROPOSE_CHAINS_AT_ONCE = 2048
"""Chains that `propose` holds at a time: every time goes over all rows of the batch."""


class PEagleTraits(NamedTuple):
    """What a draft of one size can be; see `PEagleOptions`."""

    train_embeddings: bool = True
    fc_norm: bool = False
    norm_before_residual: bool = False


class TokenInputs(NamedTuple):
    """What rows begin with, (n, H) each."""

    hidden: Tensor
    embedded: Tensor

    def then(self, others: TokenInputs) -> TokenInputs:
        return TokenInputs(*(torch.cat(both) for both in zip(self, others, strict=True)))


class PEagleDraft(ReducedVocabularyDraft):
    """The trainable draft. The target's head is a buffer outside the checkpoint, and so is its embedding where the draft trains
    none of its own.

    Args:
        draft_ids: (V_d,) int64 ascending, target ids that the draft's head predicts.
        generator: the only source of randomness of the initial weights; embeddings and head begin as the target's.
        attention: back end, of both attentions, see `ttt_attention` and draftworks.drafts.attention.
    """

    def __init__(
        self,
        target: TargetParts,
        sizes: PEagleSizes,
        draft_ids: Tensor,
        generator: torch.Generator,
        traits: PEagleTraits,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        if traits.train_embeddings:
            self.embed_tokens = uninitialized(nn.Embedding, *target.embedding.shape)
            with torch.no_grad():
                self.embed_tokens.weight.copy_(target.embedding)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, sizes.taps * width, generator=generator))
        self.fc_norm = nn.ModuleList(RmsNorm(width, eps) for _ in range(sizes.taps if traits.fc_norm else 0))
        self.fc = seeded_linear(sizes.taps * width, width, generator)
        first = PEagleFirstLayer(target, sizes, generator, traits.norm_before_residual)
        self.layers = nn.ModuleList(
            [first, *(PEagleLayer(target, sizes, generator) for _ in range(1, sizes.num_layers))]
        )
        self.norm = RmsNorm(width, eps)
        self._init_head(draft_ids, target)
        self.rotary = Rotary(target)
        self.mask_token_id, self.head_dim, self._attention = sizes.mask_token_id, target.head_dim, attention
        self._trains_embeddings = traits.train_embeddings
        shared = target.tied and not traits.train_embeddings
        self.register_buffer(
            "target_embedding", None if traits.train_embeddings else target.embedding, persistent=False
        )
        self.register_buffer("own_target_head", None if shared else target.head, persistent=False)

    @property
    def target_head(self) -> Tensor:
        return self.target_embedding if self.own_target_head is None else self.own_target_head

    def embed(self, ids: Tensor) -> Tensor:
        """In the draft's dtype."""
        table = self.embed_tokens.weight if self._trains_embeddings else self.target_embedding
        return F.embedding(ids, table).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """From the taps side by side (…, taps · H), ascending, to the state that a row begins with (…, H)."""
        return fuse_taps(features, self.fc_norm, self.fc)

    def begin(self, features: Tensor, next_tokens: Tensor) -> TokenInputs:
        """Of rows at depth 0, from their features (n, taps · H) and the tokens after them (n,)."""
        return TokenInputs(self.fuse(features), self.embed(next_tokens))

    def begin_masked(self) -> TokenInputs:
        """Of one masked place; they all begin alike."""
        token = torch.full((1,), self.mask_token_id, device=self.mask_hidden.device)
        return self.begin(self.mask_hidden[0], token)

    def through_layers(
        self, inputs: TokenInputs, rows: Sequence[TokenLayout], wanted: ActivePositions | None = None
    ) -> Tensor:
        """What `lm_head` reads of the rows that are wanted, or of all.

        Args:
            rows: for every layer.
        """
        first, *others = zip(self.layers, rows, strict=True)
        layer, its_rows = first
        hidden = layer(*inputs, its_rows, None if others else wanted)
        for number, (layer, its_rows) in enumerate(others, start=1):
            hidden = layer(hidden, its_rows, wanted if number == len(others) else None)
        return self.norm(hidden)

    def states(self, input_ids: Tensor, features: Tensor, kept: Tensor, documents: Documents) -> list[Tensor]:
        """By depth, what `lm_head` reads of the rows that are kept there, by ascending row: (R_d, H) each.

        Args:
            input_ids: (B, S). Row a reads token a + 1; at the end of the document token 0.
            features: (B, S, taps · H), the taps in ascending order.
            kept: (D, B, S) bool, see `draw_chains`.
        """
        chains = Chains.of(kept, documents)
        by_depth = TokensByDepth.where(kept, chains)
        inputs = self.begin(features.flatten(0, 1), documents.shift_left(input_ids, 1).flatten()).then(
            self.begin_masked()
        )
        rows = TrainingLayout(chains, self.rotary, self.head_dim, inputs.hidden.dtype, self._attention)
        wanted = ActivePositions(by_depth.index, 1, input_ids.numel() + chains.count)
        return list(self.through_layers(inputs, [rows] * len(self.layers), wanted).split(by_depth.sizes))

    def forward(
        self, input_ids: Tensor, features: Tensor, last: Tensor, kept: Tensor, documents: Documents, training: bool
    ) -> DistillationLosses:
        """Distil all rows that are kept, each weighing 1; one call per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
        """
        states = torch.cat(self.states(input_ids, features, kept, documents))  # (W, H)
        plan = make_teacher_plan(kept)
        active = [ActivePositions.where(on) for on in kept]
        rows = [each.renumber(rows) for each, rows in zip(active, plan.draft_positions, strict=True)]
        plan = plan._replace(draft_positions=number_across_steps(rows, [each.index.numel() for each in active]))
        teacher = self.teacher(last, self.target_head)
        return distill(states, self.lm_head.weight, teacher, plan, [1.0] * len(kept), CrossEntropy(), training)

    @torch.no_grad()
    def propose(self, input_ids: Tensor, features: Tensor, rows: Tensor, count: int, documents: Documents) -> Tensor:
        """Whole chains from many rows at once, each as a server would make it there.

        Args:
            rows: (B, S) bool: row t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 in other rows.
        """
        draft_ids = self.draft_ids
        proposals = input_ids.new_full((input_ids.numel(), count), -1)
        for some in rows.flatten().nonzero().squeeze(1).split(PROPOSE_CHAINS_AT_ONCE):
            here = torch.zeros_like(rows).flatten().index_fill(0, some, True).view_as(rows)
            states = self.states(input_ids, features, here.expand(count, *here.shape), documents)
            choices = [argmax_of_head(self.lm_head.weight, state) for state in states]
            proposals[some] = draft_ids[torch.stack(choices, dim=-1)]
        return proposals.unflatten(0, input_ids.shape)
