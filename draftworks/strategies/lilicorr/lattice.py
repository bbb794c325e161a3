"""LiLiCorr's scores of candidates: a bidirectional transformer over all of a block's, and cosines between neighbours.

As in arXiv 2608.20530, Model-Optimizer #2342 (training) and SGLang 0.5.23 (serving), whose parameter names these are. Shapes: n
blocks, s places of a block that propose, k candidates at each, h the width here, H the target's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.layers import RmsNorm, uninitialized_linear
from draftworks.drafts.logit_losses import find_largest, log_probs_at
from draftworks.strategies.lilicorr.options import LiLiCorrOptions

CANDIDATE_FEATURES = 5
INITIAL_STD = 0.02
"""Of all matrices, the last ones too: with zeros on both sides of a cosine neither would get a gradient."""


class Candidates(NamedTuple):
    """The best tokens at each place, best first.

    Attributes:
        tokens: (n, s, k) int64.
        log_probs: (n, s, k), of the backbone over the whole vocabulary.
    """

    tokens: Tensor
    log_probs: Tensor


class LatticeScores(NamedTuple):
    """Logits of candidates, given what is before them.

    Attributes:
        first: (n, k), of those at the first place.
        following: (n, s - 1, k, k): [i, j] of candidate j given candidate i at the place before.
    """

    first: Tensor
    following: Tensor

    def at(self, place: int, before: Tensor | None) -> Tensor:
        """Return the logits (n, k) of the candidates at a place, given which one (n,) was chosen at the place before."""
        if before is None:
            return self.first
        rows = torch.arange(len(before), device=before.device)
        return self.following[rows, place - 1, before]


class Lattice(nn.Module):
    """Scores the candidates of blocks.

    Args:
        width: H.
        generator: the only source of randomness of the initial weights.
    """

    def __init__(self, options: LiLiCorrOptions, width: int, eps: float, generator: torch.Generator) -> None:
        super().__init__()
        size, heads = options.resolve_lattice_size(width), options.lattice_heads
        self._options, self._places = options, options.block_size - 1

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return _seeded_affine(inputs, outputs, generator)

        self.token_proj = None if width == size else linear(width, size)
        self.pass_hidden_proj = linear(width, size)
        self.feature_norm = nn.LayerNorm(CANDIDATE_FEATURES)
        self.feature_mlp = _Mlp(CANDIDATE_FEATURES, size, size, generator)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, self._places, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, options.candidate_topk, size))
        # One column for each difference of two positions in a block, the anchor's among them.
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * self._places + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = linear(width, size)
        self.layers = nn.ModuleList(_LatticeLayer(size, options, eps, generator) for _ in range(options.lattice_layers))
        self.output_norm = RmsNorm(size, eps)
        self.anchor_norm = RmsNorm(size, eps)
        self.factor_input_proj = linear(3 * size, size)
        factors = options.factor_dim or size
        self.out_head = linear(size, factors)
        self.in_head = linear(size, factors)
        self.anchor_out_head = linear(size, factors)

    def forward(
        self, candidates: Candidates, embedded: Tensor, states: Tensor, context: Tensor, has_context: Tensor
    ) -> LatticeScores:
        """Return the logits of all candidates.

        Args:
            embedded: (n, s, k, H), the target's embeddings of the candidates.
            states: (n, s, H), the backbone's, as its head reads them.
            context: (n, H), the fused context before the anchor.
            has_context: (n,) bool, off where there is none.
        """
        nodes = embedded if self.token_proj is None else self.token_proj(embedded)
        nodes = nodes + self.pass_hidden_proj(states)[:, :, None]
        nodes = nodes + self.feature_mlp(self.feature_norm(_describe(candidates.log_probs).to(nodes.dtype)))
        nodes = nodes + self.slot_embedding[0] + self.rank_embedding[0]
        flat, bias = nodes.flatten(1, 2), self._attention_bias()
        for layer in self.layers:
            flat = layer(flat, bias)
        return self._score(
            self.output_norm(flat).view_as(nodes),
            self.anchor_norm(self.context_proj(context) * has_context[:, None]),
        )

    def _attention_bias(self) -> Tensor:
        """Return what is added to the attention scores, (heads, s · k, s · k): by distance of places, and within one."""
        places, candidates = self._places, self._options.candidate_topk
        place = torch.arange(places, device=self.same_slot_bias.device).repeat_interleave(candidates)
        distance = place[:, None] - place
        return self.relative_slot_bias[:, distance + places] + (distance == 0) * self.same_slot_bias[:, None, None]

    def _score(self, nodes: Tensor, anchor: Tensor) -> LatticeScores:
        """Return the logits from the states of candidates (n, s, k, h) and of what is before the block (n, h)."""
        around = anchor[:, None, None].expand_as(nodes)
        factors = F.silu(self.factor_input_proj(torch.cat([nodes, around, nodes * around], dim=-1)))
        leaving, entering = self._normalize(self.out_head(factors)), self._normalize(self.in_head(factors))
        from_anchor = self._normalize(self.anchor_out_head(anchor))
        first = (entering[:, 0] @ from_anchor[..., None])[..., 0]
        following = leaving[:, :-1] @ entering[:, 1:].transpose(-1, -2)
        scale = self._options.logit_scale
        return LatticeScores(scale * _at_least_float32(first), scale * _at_least_float32(following))

    def _normalize(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self._options.vector_eps)


class _LatticeLayer(nn.Module):
    def __init__(self, size: int, options: LiLiCorrOptions, eps: float, generator: torch.Generator) -> None:
        super().__init__()
        self.attn_norm = RmsNorm(size, eps)
        self.attn = _LatticeAttention(size, options.lattice_heads, generator)
        self.mlp_norm = RmsNorm(size, eps)
        self.mlp = _Mlp(size, int(size * options.lattice_mlp_ratio), size, generator)

    def forward(self, nodes: Tensor, bias: Tensor) -> Tensor:
        nodes = nodes + self.attn(self.attn_norm(nodes), bias)
        return nodes + self.mlp(self.mlp_norm(nodes))


class _LatticeAttention(nn.Module):
    """Attention in both directions, (n, m, h) to (n, m, h), with the parameters of `nn.MultiheadAttention`."""

    def __init__(self, size: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size).normal_(std=INITIAL_STD, generator=generator))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = _seeded_affine(size, size, generator)
        self._heads = heads

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        joint = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = joint.unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        # torch's own attention has no fused kernel for a bias that is trained, and its way without one is slower.
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + bias.to(x.dtype)
        return self.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, inputs: int, size: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up_proj = _seeded_affine(inputs, size, generator)
        self.down_proj = _seeded_affine(size, outputs, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


def find_candidates(logits: Tensor, count: int) -> Candidates:
    """Return the `count` best tokens of logits (n, s, V)."""
    best = find_largest(logits, count)
    return Candidates(best, log_probs_at(logits, best))


def _describe(log_probs: Tensor) -> Tensor:
    """Return (n, s, k, 5): log p, p, log p less that of the best, rank from 0 to 1, whether it is the best."""
    count = log_probs.shape[-1]
    rank = torch.arange(count, device=log_probs.device, dtype=log_probs.dtype)
    behind = log_probs - log_probs.amax(-1, keepdim=True)
    share = (rank / max(count - 1, 1)).expand_as(log_probs)
    return torch.stack([log_probs, log_probs.exp(), behind, share, (rank == 0).expand_as(share).to(share)], dim=-1)


def _seeded_affine(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = uninitialized_linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=INITIAL_STD, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
