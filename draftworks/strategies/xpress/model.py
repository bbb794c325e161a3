"""The XPress draft model: a DFlash backbone, and a refiner that adds to its logits, asked again in a few parallel passes.

As speculators 0.9.0 trains it and vLLM's #54448 serves it. Place p of a block, p from 1, proposes token anchor + p. Its
logits are head·h_p + readout·n_p, with h_p the backbone's normed state and n_p the refiner's features of the block's states
and of the tokens before p (see draftworks.strategies.xpress.refiner). The first tokens are the argmaxes of head·h_p; then
every pass computes all places at once from the tokens of the pass before (Jacobi iteration). A place depends on earlier ones
only, so after `jacobi_passes` passes so many first tokens are those of decoding one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.logit_losses import find_argmax
from draftworks.strategies.dflash.block_drafter import ChooseTokens, SequentialBlockDraft
from draftworks.strategies.dflash.model import BlockStates, DFlashDraft
from draftworks.strategies.dflash.teacher import locate_teachers
from draftworks.strategies.xpress.loss import XPressLosses, XPressObjective, XPressStates, xpress_losses
from draftworks.strategies.xpress.refiner import Refiner, RefinerSizes


class XPressDraft(SequentialBlockDraft):
    """The trainable draft.

    Args:
        backbone: its norm, and the target's embedding and head, are used here too.
        generator: the only source of randomness of the refiner's initial weights.
    """

    def __init__(
        self, backbone: DFlashDraft, sizes: RefinerSizes, jacobi_passes: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.backbone = backbone
        vocab, hidden = backbone.embed_tokens.shape
        self.refiner_head = Refiner(hidden, vocab, sizes, generator)
        self._passes = jacobi_passes

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        last: Tensor,
        blocks: Blocks,
        labels: Tensor,
        label_mask: Tensor,
        objective: XPressObjective,
    ) -> XPressLosses:
        """Return the loss of the labels that count; called once per micro-batch.

        Args:
            last: (B, S, H), the target's last hidden states.
            labels, label_mask: (B, A, size - 1), int64 and bool.
        """
        backbone, refiner = self.backbone, self.refiner_head
        taught = label_mask.any(-1)  # (B, A), on at N blocks
        states = backbone.compute_states(input_ids, backbone.fuse_context(features), blocks)[taught]  # (N, size, H)
        known = input_ids.gather(1, blocks.anchors)[taught]
        labels, label_mask = labels[taught], label_mask[taught]
        normed = backbone.norm(states)
        read = refiner.read_states(normed)
        rounds = self._play_rounds(normed, read, known, objective)
        narrow = [refiner.forward_block(read, known, tokens)[label_mask] for tokens in (labels, *rounds)]
        inputs = XPressStates(
            states=normed[:, 1:][label_mask],
            narrow=torch.stack(narrow, dim=1),
            positions=locate_teachers(blocks, input_ids.shape[1])[taught][:, :-1][label_mask],
        )
        projection = refiner.projection.to(normed.dtype)
        return xpress_losses(
            inputs, backbone.target_head, projection, last.flatten(0, 1), labels, label_mask, objective
        )

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """See the base. All passes but the last take the argmax, so no token that `choose` returns is looked at."""
        normed = self.backbone.norm(blocks.states)
        read = self.refiner_head.read_states(normed)
        base = self._score_alone(normed, count)  # (n, count, V)
        logits = base
        for _ in range(self._passes):
            logits = self._refine(base, read, blocks.known, find_argmax(logits))
        return torch.stack([choose(place) for place in logits.unbind(1)], dim=1)

    def _score_alone(self, normed: Tensor, count: int) -> Tensor:
        """Return the backbone's logits (n, count, V) of the first `count` proposals."""
        # Of a slice, torch would multiply block by block, in twice the time.
        return F.linear(normed[:, 1 : 1 + count].contiguous(), self.backbone.target_head)

    def _refine(self, base: Tensor, read: Tensor, known: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (n, k, V) after a pass over tokens (n, k)."""
        narrow = self.refiner_head.forward_block(read, known, tokens)
        return base + F.linear(narrow, self.refiner_head.projection.to(narrow.dtype))

    @torch.no_grad()
    def _play_rounds(self, normed: Tensor, read: Tensor, known: Tensor, objective: XPressObjective) -> list[Tensor]:
        """Return the tokens (N, size - 1) that each pass on the draft's own tokens is given."""
        if objective.rounds == 0:
            return []
        played: list[list[Tensor]] = []
        pieces = (part.split(objective.chunk_blocks) for part in (normed, read, known))
        for states, shared, anchors in zip(*pieces, strict=True):
            base = self._score_alone(states, states.shape[1] - 1)
            tokens = [find_argmax(base)]
            while len(tokens) < objective.rounds:
                tokens.append(find_argmax(self._refine(base, shared, anchors, tokens[-1])))
            played.append(tokens)
        return [torch.cat(tokens) for tokens in zip(*played, strict=True)]
