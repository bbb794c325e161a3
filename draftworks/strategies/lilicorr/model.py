"""The LiLiCorr draft model: a DFlash backbone, and a small transformer that reranks the candidates of a block together.

As Model-Optimizer trains it (#2342) and SGLang 0.5.23 serves it. One pass of the backbone makes a block's states; each place
keeps the best tokens of its logits; one pass of the transformer scores all of them, given which one is chosen before. Then
the places are decoded one after the other: the candidate with the best score, or a draw from softmax(scores / temperature).
The backbone's log-probabilities are an input of the scores, and not added to them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, at_least_float32
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import TaughtBlocks
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, ChooseTokens, DFlashDraft
from draftworks.strategies.lilicorr.lattice import Candidates, Lattice, LatticeScores, find_candidates
from draftworks.strategies.lilicorr.loss import lilicorr_losses
from draftworks.strategies.lilicorr.options import LiLiCorrOptions


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
