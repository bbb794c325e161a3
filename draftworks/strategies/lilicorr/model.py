"""The LiLiCorr draft model: a DFlash backbone, and a small transformer that reranks the candidates of a block together.

As Model-Optimizer trains it (#2342) and SGLang 0.5.23 serves it. One pass of the backbone makes a block's states; each place
keeps the best tokens of its logits; one pass of the transformer scores all of them, given which one is chosen before. Then
the places are decoded one after the other: the candidate with the best score, or a draw from softmax(scores / temperature).
The backbone's log-probabilities are an input of the scores, and not added to them.

LiLiCorr's loss: DFlash's, and three terms of the candidates' scores, in chunks of whole blocks.

At a place whose label is candidate y, and whose former label is a candidate too, let z be the logits (k,) of the candidates
given that former label, and t the target's logits of the same candidates. With c = softmax(z), the place costs

    ce_weight · CE(z, y) + margin_weight · max(0, margin - (z_y - max_{j≠y} z_j)) + penalty_weight · Σ_j c_j · max(0, t_y - t_j)

if all labels of its block count, and all labels up to it are candidates (Model-Optimizer #2342). The log-probabilities that the
candidates come with are not detached, so these terms teach the backbone too. Shapes: N blocks of k labels, K candidates; n
blocks in a chunk.

LiLiCorr's scores of candidates: a bidirectional transformer over all of a block's, and cosines between neighbours.

As in arXiv 2608.20530, Model-Optimizer #2342 (training) and SGLang 0.5.23 (serving), whose parameter names these are. Shapes: n
blocks, s places of a block that propose, k candidates at each, h the width here, H the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from draftworks.drafts.layers import RmsNorm, uninitialized_linear
from draftworks.drafts.logit_losses import (
    LossSums,
    as_logits,
    at_least_float32,
    chunked_loss,
    find_largest,
    log_probs_at,
)
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import TaughtBlocks, choose_weighting, sum_prefix_lengths
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, ChooseTokens, DFlashDraft
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


Score = Callable[..., LatticeScores]
"""score(candidates, states, context, has_context, *parameters): the logits of candidates."""


@dataclass(frozen=True)
class LatticeChunk:
    """n whole blocks, `index` among all; a `LossChunk`. Labels and mask are (n, k), int64 and bool."""

    index: slice
    labels: Tensor
    label_mask: Tensor


def lilicorr_losses(
    blocks: TaughtBlocks, head: Tensor, settings: LossSettings, score: Score, parameters: list[Tensor]
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums: `loss_sums`, of the backbone's cross-entropies; `acc_corrects`, labels that the scores choose, given the true label
    before; `base_acc_corrects`, labels that are the backbone's argmax; `in_lattice_sums`, labels among the candidates;
    `accept_len_sums`, `base_accept_len_sums` and `lattice_len_sums`, total length of the blocks' prefixes that are all chosen,
    all the backbone's argmax, and all among the candidates.

    Args:
        blocks: places whose labels do not count have candidates too, as in serving.
        head: (V, H), frozen, of draft and target.
        parameters: those of the scores, that a chunk's gradients are taken of.
    """
    assert blocks.last is not None, "the strategy reads the target's last hidden states"
    options, weigh = settings.options, choose_weighting(settings.options)

    def formula(
        chunk: LatticeChunk, states: Tensor, context: Tensor, has_context: Tensor, last: Tensor, *parameters: Tensor
    ) -> LossSums:
        logits = as_logits(F.linear(states, head))  # (n, k, V)
        best = find_largest(logits, options.candidate_topk)  # (n, k, K)
        log_probs = log_probs_at(logits, torch.cat([chunk.labels[..., None], best], dim=-1))  # (n, k, 1 + K)
        ce, candidates = -log_probs[..., 0], Candidates(best, log_probs[..., 1:])
        counted = chunk.label_mask
        weights = weigh(ce.detach() * counted, counted).to(ce.dtype)
        chain = follow_labels(candidates, score(candidates, states, context, has_context, *parameters), chunk.labels)
        taught = chain.reachable & counted.all(1, keepdim=True)
        terms = _weigh_terms(chain, _target_gaps(last, head, candidates, chain.label_index), options)
        # What is not taught may be infinite there, and 0 · inf is not 0.
        loss = (weights * ce).sum() + terms.where(taught, 0).sum()
        with torch.no_grad():
            correct = chain.is_chosen & counted
            base = (candidates.tokens[..., 0] == chunk.labels) & counted
            found = chain.found & counted
        sums = {
            "acc_corrects": correct.sum(0),
            "loss_sums": (ce.detach() * counted).sum(0),
            "base_acc_corrects": base.sum(0),
            "in_lattice_sums": found.sum(0),
            "accept_len_sums": sum_prefix_lengths(correct, counted),
            "base_accept_len_sums": sum_prefix_lengths(base, counted),
            "lattice_len_sums": sum_prefix_lengths(found, counted),
        }
        return LossSums(loss, sums)

    chunks = _split_into_chunks(blocks.labels, blocks.label_mask, options.choose_chunk_blocks(head.device))
    # Of a slice, torch would multiply block by block, in twice the time.
    states = blocks.states[:, -blocks.labels.shape[1] :].contiguous()  # (N, k, H)
    last = blocks.last[blocks.positions]  # (N, k, H)
    return chunked_loss(formula, chunks, [states, blocks.context, blocks.has_context, last], parameters)


class LabelChain(NamedTuple):
    """The candidates' logits along the labels, (n, k, …).

    Attributes:
        logits: (n, k, K), given the label before; of no meaning where that is no candidate.
        label_index: (n, k) int64, which candidate the label is; 0 where it is none.
        found: (n, k) bool, whether it is one.
    """

    logits: Tensor
    label_index: Tensor
    found: Tensor

    @property
    def reachable(self) -> Tensor:
        """Whether this label and all before it are candidates, (n, k) bool."""
        return self.found.cumprod(1).bool()

    @property
    def is_chosen(self) -> Tensor:
        """Whether the scores choose this label after the true ones, (n, k) bool."""
        return self.reachable & (self.logits.argmax(-1) == self.label_index)


def follow_labels(candidates: Candidates, scores: LatticeScores, labels: Tensor) -> LabelChain:
    """Return the logits of the candidates at each place, given the label (n, k) before it."""
    hits = candidates.tokens == labels[..., None]
    index = hits.to(torch.int8).argmax(-1)
    along = scores.following.take_along_dim(index[:, :-1, None, None], dim=2)[:, :, 0]  # (n, k - 1, K)
    return LabelChain(torch.cat([scores.first[:, None], along], dim=1), index, hits.any(-1))


def _weigh_terms(chain: LabelChain, gaps: Tensor, options: LiLiCorrOptions) -> Tensor:
    """Return what each place costs, (n, k); see the module.

    Args:
        gaps: (n, k, K), max(0, t_y - t_j).
    """
    log_c = chain.logits.log_softmax(-1)
    at_label = chain.label_index[..., None]
    terms = -options.ce_weight * log_c.gather(-1, at_label)[..., 0]
    if options.margin_weight and chain.logits.shape[-1] > 1:
        own = chain.logits.gather(-1, at_label)[..., 0]
        best_other = chain.logits.scatter(-1, at_label, -torch.inf).amax(-1)
        terms = terms + options.margin_weight * F.relu(options.margin - (own - best_other))
    if options.penalty_weight:
        terms = terms + options.penalty_weight * (log_c.exp() * gaps).sum(-1)
    return terms


@torch.no_grad()
def _target_gaps(last: Tensor, head: Tensor, candidates: Candidates, label_index: Tensor) -> Tensor:
    """Return how far each candidate's logit is below the label's, by the target, at least 0: (n, k, K)."""
    rows = head[candidates.tokens]  # (n, k, K, H)
    logits = at_least_float32((rows @ last.to(head.dtype)[..., None])[..., 0])
    return F.relu(logits.gather(-1, label_index[..., None]) - logits)


def _split_into_chunks(labels: Tensor, label_mask: Tensor, chunk_blocks: int) -> Iterator[LatticeChunk]:
    """Yield `chunk_blocks` blocks at a time, at least one chunk."""
    for start in range(0, max(len(labels), 1), chunk_blocks):
        index = slice(start, start + chunk_blocks)
        yield LatticeChunk(index, labels[index], label_mask[index])


class LiLiCorrDraft(BlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the transformer's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, options: LiLiCorrOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        width, eps = backbone.embed_tokens.shape[1], backbone.norm.eps
        self.lilicorr = Lattice(options, width, eps, generator)
        self._candidates = options.candidate_topk

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        """See the base. The candidates of a block are scored given the true tokens before them."""
        names, parameters = zip(*self.lilicorr.named_parameters())

        def score(
            candidates: Candidates, states: Tensor, context: Tensor, has: Tensor, *weights: Tensor
        ) -> LatticeScores:
            arguments = (candidates, self.backbone.embed(candidates.tokens), states, context, has)
            return functional_call(self.lilicorr, dict(zip(names, weights, strict=True)), arguments)

        return lilicorr_losses(blocks, self.backbone.target_head, settings, score, list(parameters))

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        backbone = self.backbone
        normed = backbone.norm(blocks.states[:, 1:])
        logits = at_least_float32(F.linear(normed, backbone.target_head))  # (n, size - 1, V)
        candidates = find_candidates(logits, self._candidates)
        has_context = torch.ones_like(blocks.known, dtype=torch.bool)
        scores = self.lilicorr(candidates, backbone.embed(candidates.tokens), normed, blocks.context, has_context)
        decoded, before = [], None
        for place in range(count):
            tokens = candidates.tokens[:, place]  # (n, k)
            among_all = torch.full_like(logits[:, 0], -torch.inf).scatter(-1, tokens, scores.at(place, before))
            token = choose(among_all)
            before = (tokens == token[:, None]).to(torch.int8).argmax(-1)
            decoded.append(token)
        return torch.stack(decoded, dim=1)
