"""The P-EAGLE draft model: EAGLE-3's positions, each followed by masked places for the next tokens, in one pass.

As speculators and SpecForge train it and vLLM serves it. Position a knows the target's features up to a and the tokens up to
a + 1. At depth 0 it reads embed(token a + 1) and fc(features a); at depth d ≥ 1, embed(mask token) and fc(mask_hidden), at the
rotary position a + d. The normed state of depth d, through `lm_head`, proposes token a + 2 + d. A position at depth 0 sees
depth 0 of its document up to itself, as at the first step of `ttt_attention`; at depth d it sees what its anchor sees, and the
depths 1 … d of its own chain (`Chains.make_seen_keys`). With a window, every place sees the newest `window` positions of these,
its own included, which is at least the chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.attention import DraftAttention, KeyValue, Window
from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.layers import (
    GatedMlp,
    ReducedVocabularyDraft,
    RmsNorm,
    Rotary,
    UninitializedEmbedding,
    argmax_of_head,
    fuse_taps,
    seeded_linear,
    without_compile,
)
from draftworks.drafts.logit_losses import LossSums
from draftworks.drafts.objectives import CrossEntropy, LossSettings, make_teacher_plan
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.attention import ttt_attention
from draftworks.strategies.eagle3.loss import distill, number_across_steps
from draftworks.strategies.peagle.chains import Chains, TokensByDepth


class PEagleSizes(NamedTuple):
    """Sizes of the draft; the others are the target's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int
    num_layers: int
    mask_token_id: int


class TokenLayout(ABC):
    """The tokens that a layer is applied to, and which of them see which."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention with rotary positions, (T, heads · width), of projected tokens (n, heads · width)."""

    @abstractmethod
    def expand_states(self, x: Tensor) -> Tensor:
        """Return the states of all tokens (T, H) from those that the layer was given (n, H)."""


class TrainingLayout(TokenLayout):
    """The N positions of a batch, then the R masked places of its chains: T = N + R tokens.

    All masked places have the same input, so the first layer is given one for all of them, n = N + 1; later layers get n = T.

    Args:
        width: size of a head.
        backend: back end of both attentions, see `ttt_attention` and draftworks.drafts.attention.
        window: newest positions that every token sees, its own included; None for all.
    """

    def __init__(
        self, chains: Chains, rotary: Rotary, width: int, dtype: torch.dtype, backend: str, window: int | None
    ) -> None:
        self._chains, self._width, self._backend, self._window = chains, width, backend, window
        table = rotary(chains.documents.longest + chains.limit, dtype)
        self._at_batch = table.at(chains.documents.positions)
        self._at_chains = table.at(chains.positions)
        self._attend_chains = DraftAttention(chains.make_seen_keys(), backend, "peagle")

    @without_compile  # the number of chains differs in every batch
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [self._masked_heads(x)[None].transpose(1, 2) for x in (query, key, value)]
        query, key, value = (self._batch_heads(x).transpose(1, 2) for x in (query, key, value))
        query, key = self._at_batch.apply(query), self._at_batch.apply(key)
        attended = ttt_attention(query, [key], [value], self._chains.documents, self._backend, self._window)
        batch = attended.transpose(1, 2).flatten(2).flatten(0, 1)  # (N, heads · width)
        context = KeyValue(_in_one_row(key), _in_one_row(value))
        own_query, own_key = self._at_chains.apply(own[0]), self._at_chains.apply(own[1])
        window = None if self._window is None else Window(self._window)
        masked = self._attend_chains(own_query, context, KeyValue(own_key, own[2]), window)
        return torch.cat([batch, masked[0].transpose(0, 1).flatten(1)])

    @without_compile
    def expand_states(self, x: Tensor) -> Tensor:
        count = self._chains.batch * self._chains.length
        return torch.cat([x[:count], x[count:].expand(self._chains.count, -1)])

    def _batch_heads(self, x: Tensor) -> Tensor:
        """Return the batch's part of (n, heads · width) as (B, S, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[:count].unflatten(0, (self._chains.batch, -1)).unflatten(-1, (-1, self._width))

    def _masked_heads(self, x: Tensor) -> Tensor:
        """Return the masked places' part of (n, heads · width) as (R, heads, width)."""
        count = self._chains.batch * self._chains.length
        return x[count:].expand(self._chains.count, -1).unflatten(-1, (-1, self._width))


def _in_one_row(heads: Tensor) -> Tensor:
    """Return (B, heads, S, width) as (1, heads, B·S, width)."""
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
    """A Llama layer over tokens (n, H)."""

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, reads_tokens: bool = False
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = PEagleAttention(2 * width if reads_tokens else width, target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def forward(self, hidden: Tensor, layout: TokenLayout, wanted: ActivePositions | None = None) -> Tensor:
        """Return the states (T, H) of all tokens, or of the wanted ones, from those before the layer (n, H)."""
        return self._forward_over(self.input_layernorm(hidden), hidden, layout, wanted)

    def _forward_over(
        self, read: Tensor, residual: Tensor, layout: TokenLayout, wanted: ActivePositions | None
    ) -> Tensor:
        attention = self.self_attn
        attended = layout.attend(attention.q_proj(read), attention.k_proj(read), attention.v_proj(read))
        residual = layout.expand_states(residual)
        if wanted is not None:
            attended, residual = wanted.gather(attended[None]), wanted.gather(residual[None])
        hidden = residual + attention.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PEagleFirstLayer(PEagleLayer):
    """The first layer, which reads [token, state], each with its own norm. The residual stream begins as the state.

    Args:
        norm_before_residual: the residual stream begins as the normed state.
    """

    def __init__(
        self, target: TargetParts, sizes: PEagleSizes, generator: torch.Generator, norm_before_residual: bool
    ) -> None:
        super().__init__(target, sizes, generator, reads_tokens=True)
        self.hidden_norm = RmsNorm(target.hidden_size, target.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - it reads the tokens too
        self, hidden: Tensor, embedded: Tensor, layout: TokenLayout, wanted: ActivePositions | None = None
    ) -> Tensor:
        """Return the same as other layers; `embedded` are the tokens' embeddings (n, H)."""
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self._forward_over(read, normed if self._norm_before_residual else hidden, layout, wanted)


PROPOSE_CHAINS_AT_ONCE = 2048
"""Chains that `propose` holds at a time; every pass reads all positions of the batch."""


class PEagleTraits(NamedTuple):
    """Options of the model's structure beyond its sizes; see `PEagleOptions`."""

    train_embeddings: bool = True
    fc_norm: bool = False
    norm_before_residual: bool = False
    sliding_window: int | None = None


class TokenInputs(NamedTuple):
    """Input states and embeddings of tokens, (n, H) each."""

    hidden: Tensor
    embedded: Tensor

    def concat(self, others: TokenInputs) -> TokenInputs:
        return TokenInputs(*(torch.cat(both) for both in zip(self, others, strict=True)))


class PEagleDraft(ReducedVocabularyDraft):
    """The trainable draft. The target's head is a buffer outside the checkpoint, as is its embedding unless the draft trains one.

    Args:
        draft_ids: (V_d,) int64 ascending, target ids that the draft's head predicts.
        generator: the only source of randomness of the initial weights; embeddings and head begin as the target's.
        attention: back end of both attentions, see `ttt_attention` and draftworks.drafts.attention.
    """

    target_embedding: Tensor
    own_target_head: Tensor | None

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
            self.embed_tokens = UninitializedEmbedding(target.vocab_size, target.hidden_size)
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
        self.window = traits.sliding_window
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
        """Embed ids (…) to (…, H), in the draft's dtype."""
        table = self.embed_tokens.weight if self._trains_embeddings else self.target_embedding
        return F.embedding(ids, table).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the input state of a position (…, H) from the taps side by side, ascending, (…, taps · H)."""
        return fuse_taps(features, self.fc_norm, self.fc)

    def make_inputs(self, features: Tensor, next_tokens: Tensor) -> TokenInputs:
        """Return the input of positions at depth 0, from their features (n, taps · H) and the next tokens (n,)."""
        return TokenInputs(self.fuse(features), self.embed(next_tokens))

    def make_masked_inputs(self) -> TokenInputs:
        """Return the input of one masked place; it is the same for all."""
        token = torch.full((1,), self.mask_token_id, device=self.mask_hidden.device)
        return self.make_inputs(self.mask_hidden[0], token)

    def run_layers(
        self, inputs: TokenInputs, layouts: Sequence[TokenLayout], wanted: ActivePositions | None = None
    ) -> Tensor:
        """Return the normed states that `lm_head` reads, of the wanted tokens or of all.

        Args:
            layouts: one for every layer.
        """
        first, *others = zip(self.layers, layouts, strict=True)
        layer, layout = first
        hidden = layer(*inputs, layout, None if others else wanted)
        for number, (layer, layout) in enumerate(others, start=1):
            hidden = layer(hidden, layout, wanted if number == len(others) else None)
        return self.norm(hidden)

    def compute_states(self, input_ids: Tensor, features: Tensor, kept: Tensor, documents: Documents) -> list[Tensor]:
        """Return the normed states of the kept positions, (R_d, H) for each depth, by ascending position.

        Args:
            input_ids: (B, S). Position a reads token a + 1; at the end of the document, token 0.
            features: (B, S, taps · H), the taps in ascending order.
            kept: (D, B, S) bool, see `draw_chains`.
        """
        chains = Chains.of(kept, documents)
        by_depth = TokensByDepth.where(kept, chains)
        inputs = self.make_inputs(features.flatten(0, 1), documents.shift_left(input_ids, 1).flatten()).concat(
            self.make_masked_inputs()
        )
        layout = TrainingLayout(chains, self.rotary, self.head_dim, inputs.hidden.dtype, self._attention, self.window)
        wanted = ActivePositions(by_depth.index, 1, input_ids.numel() + chains.count)
        return list(self.run_layers(inputs, [layout] * len(self.layers), wanted).split(by_depth.sizes))

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        last: Tensor,
        kept: Tensor,
        documents: Documents,
        settings: LossSettings,
        argmaxes: Tensor | None = None,
    ) -> LossSums:
        """Distil all kept positions, each with weight 1; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden state after its final norm.
            argmaxes: (B·S,) int64, the target's argmax at the positions that teach, where it is known.
        """
        states = torch.cat(self.compute_states(input_ids, features, kept, documents))  # (W, H)
        plan = make_teacher_plan(kept)
        active = [ActivePositions.where(on) for on in kept]
        rows = [each.renumber(rows) for each, rows in zip(active, plan.draft_positions, strict=True)]
        plan = plan._replace(draft_positions=number_across_steps(rows, [each.index.numel() for each in active]))
        teacher = self.teacher(last, self.target_head, argmaxes)
        weights = [1.0] * len(kept)
        return distill(states, self.lm_head.weight, teacher, plan, weights, CrossEntropy(), settings)

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, features: Tensor, position_mask: Tensor, count: int, documents: Documents
    ) -> Tensor:
        """Return the chain that a server would propose at each of many positions.

        Args:
            position_mask: (B, S) bool: position t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.

        Returns:
            (B, S, count) int64 ids of the target; -1 at other positions.
        """
        draft_ids = self.draft_ids
        proposals = input_ids.new_full((input_ids.numel(), count), -1)
        for anchors in position_mask.flatten().nonzero().squeeze(1).split(PROPOSE_CHAINS_AT_ONCE):
            here = torch.zeros_like(position_mask).flatten().index_fill(0, anchors, True).view_as(position_mask)
            states = self.compute_states(input_ids, features, here.expand(count, *here.shape), documents)
            choices = [argmax_of_head(self.lm_head.weight, state) for state in states]
            proposals[anchors] = draft_ids[torch.stack(choices, dim=-1)]
        return proposals.unflatten(0, input_ids.shape)
