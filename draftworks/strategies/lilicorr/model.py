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

from draftworks.drafts.anchors import Blocks
from draftworks.strategies.dflash.block_drafter import ChooseTokens, SequentialBlockDraft
from draftworks.strategies.dflash.loss import at_least_float32
from draftworks.strategies.dflash.model import BlockStates, DFlashDraft
from draftworks.strategies.lilicorr.lattice import Candidates, Lattice, LatticeScores, LatticeSizes, find_candidates
from draftworks.strategies.lilicorr.loss import LiLiCorrLosses, LiLiCorrObjective, LiLiCorrStates, lilicorr_losses


class LiLiCorrDraft(SequentialBlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the transformer's initial weights.
    """

    def __init__(self, backbone: DFlashDraft, sizes: LatticeSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        self.lilicorr = Lattice(sizes, generator)
        self._candidates = sizes.candidates

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        last: Tensor,
        blocks: Blocks,
        labels: Tensor,
        label_mask: Tensor,
        objective: LiLiCorrObjective,
    ) -> LiLiCorrLosses:
        """Return the loss of the labels that count; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden states.
            labels, label_mask: (B, A, size - 1), int64 and bool.
        """
        backbone = self.backbone
        context = backbone.fuse_context(features)  # (B, S, H)
        taught = label_mask.any(-1)  # (B, A), on at N blocks
        states = backbone.compute_states(input_ids, context, blocks)[taught][:, 1:]  # (N, size - 1, H)
        row, anchors = taught.nonzero()[:, 0], blocks.anchors[taught]
        # The label at anchor + 1 + i is predicted by the target at anchor + i, which may be behind the row's end.
        places = torch.arange(labels.shape[-1], device=row.device)
        predicted_at = (anchors[:, None] + places).clamp_max(input_ids.shape[1] - 1)
        names, parameters = zip(*self.lilicorr.named_parameters())

        def score(
            candidates: Candidates, states: Tensor, context: Tensor, has: Tensor, *weights: Tensor
        ) -> LatticeScores:
            arguments = (candidates, backbone.embed(candidates.tokens), states, context, has)
            return functional_call(self.lilicorr, dict(zip(names, weights, strict=True)), arguments)

        return lilicorr_losses(
            LiLiCorrStates(
                states=backbone.norm(states),
                context=context[row, (anchors - 1).clamp_min(0)],
                has_context=anchors > blocks.begins[taught],
                last=last[row[:, None], predicted_at],
            ),
            backbone.target_head,
            labels[taught],
            label_mask[taught],
            objective,
            score,
            list(parameters),
        )

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
