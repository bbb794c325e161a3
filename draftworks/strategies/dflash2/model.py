"""The DFlash 2 draft model: DFlash's layers with convolutions, and a selector that joins the candidates of a block to a path.

As speculators 0.9.0 (`models/dflash2/`) trains it and SGLang 0.5.23 (`models/dflash.py`) serves it. Place i of a block, i
from 1, proposes token anchor + i. With h_i the backbone's state there, normed as the head reads it, and C_i the k likeliest
tokens of its logits u_i, the score of candidate c in C_i after the token `previous` is

    score_i(c) = u_i(c) + ⟨predecessor_codebook[previous] ⊙ hidden_projection·h_i, successor_codebook[c]⟩

The tokens of a block are chosen one after another, `previous` being the anchor and then the token that was just chosen: the
candidate of the highest score, or one drawn from the softmax of the k scores, which is then the q of rejection sampling. No
other token is ever proposed.

Initially `successor_codebook` is 0, so an untrained DFlash 2 proposes what DFlash does. (speculators draws all three factors
with a deviation of 0.02. From 0, no noise has to be unlearned.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.layers import seeded_linear
from draftworks.strategies.dflash.block_drafter import ChooseTokens, SequentialBlockDraft
from draftworks.strategies.dflash.loss import at_least_float32
from draftworks.strategies.dflash.model import BlockStates, DFlashDraft
from draftworks.strategies.dflash2.loss import (
    DFlash2Losses,
    DFlash2Objective,
    DFlash2States,
    dflash2_cross_entropies,
    score_candidates,
)


class CandidateSelector(nn.Module):
    """The factors of the selector. Parameter names are those of speculators and SGLang."""

    def __init__(self, hidden: int, vocab: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        nn.init.normal_(self.predecessor_codebook, generator=generator)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = seeded_linear(hidden, rank, generator)

    def project(self, states: Tensor) -> Tensor:
        """Return (…, r) from normed states (…, H)."""
        return self.hidden_projection(states)

    def remember(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor (…, r) of the tokens (…) before a place."""
        return F.embedding(tokens, self.predecessor_codebook).to(dtype)


class SelectorSizes(NamedTuple):
    """Width of the factors, and the number of candidates of a place."""

    rank: int
    top_k: int


class DFlash2Draft(SequentialBlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the selector's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, sizes: SelectorSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        self.candidate_selector = CandidateSelector(hidden, vocab, sizes.rank, generator)
        self._top_k = sizes.top_k

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        blocks: Blocks,
        labels: Tensor,
        label_mask: Tensor,
        objective: DFlash2Objective,
    ) -> DFlash2Losses:
        """Return the loss of the labels that count, each given the true token before it; called once per micro-batch.

        Args:
            labels, label_mask: (B, A, size - 1), int64 and bool.
        """
        backbone, selector = self.backbone, self.candidate_selector
        states = backbone.compute_states(input_ids, backbone.fuse_context(features), blocks)[:, :, 1:]
        normed = backbone.norm(states[label_mask])  # (L, H)
        known = input_ids.gather(1, blocks.anchors)[..., None]
        previous = torch.cat([known, labels[..., :-1]], dim=-1)[label_mask]  # (L,)
        return dflash2_cross_entropies(
            DFlash2States(normed, selector.remember(previous, normed.dtype) * selector.project(normed)),
            backbone.target_head,
            selector.successor_codebook,
            labels.flatten(0, 1),
            label_mask.flatten(0, 1),
            objective,
        )

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """See the base. Tokens that are no candidates have the logit -inf."""
        selector = self.candidate_selector
        normed = self.backbone.norm(blocks.states[:, 1 : 1 + count])
        unary, candidates = at_least_float32(F.linear(normed, self.backbone.target_head)).topk(self._top_k, dim=-1)
        projected, vocab = selector.project(normed), len(selector.successor_codebook)
        decoded, token = [], blocks.known
        for place in range(count):
            context = selector.remember(token, normed.dtype) * projected[:, place]  # (n, r)
            ids = candidates[:, place]
            scores = score_candidates(unary[:, place], context, selector.successor_codebook, ids)  # (n, k)
            token = choose(scores.new_full((len(scores), vocab), -torch.inf).scatter_(1, ids, scores))
            decoded.append(token)
        return torch.stack(decoded, dim=1)
