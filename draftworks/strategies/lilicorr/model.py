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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

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
from draftworks.strategies.lilicorr.lattice import Candidates, Lattice, LatticeScores, find_candidates
from draftworks.strategies.lilicorr.options import LiLiCorrOptions

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
