"""Block drafts whose tokens are decoded one after another (Domino, DSpark), and their drafter for one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor, nn

from draftworks.drafts.documents import Documents
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.model import BlockStates, DFlashDraft

ChooseTokens = Callable[[Tensor], Tensor]
"""From logits (n, V) to the proposed tokens (n,)."""


class SequentialBlockDraft(nn.Module, ABC):
    """A block draft that decodes each token from the backbone's state and the tokens before it in the block."""

    backbone: DFlashDraft

    @abstractmethod
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """Decode the tokens of n blocks one place after another, (n, count) int64.

        Args:
            choose: called once per place, in order.
        """

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, features: Tensor, position_mask: Tensor, count: int, documents: Documents | None = None
    ) -> Tensor:
        """Return what a server would propose at each of many positions, greedily; as `DFlashDraft.propose`."""

        def decode_greedily(blocks: BlockStates) -> Tensor:
            return self.decode(blocks, count, lambda logits: logits.argmax(-1))

        return self.backbone.propose_blocks(input_ids, features, position_mask, count, decode_greedily, documents)


class BlockDrafter(Drafter):
    """Serving form: the backbone computes a block's states once, then tokens are decoded one after another.

    Args:
        backbone: the backbone's drafter, with the cache of the sequence.
    """

    def __init__(self, draft: SequentialBlockDraft, backbone: DFlashDrafter) -> None:
        self._draft = draft
        self._backbone = backbone

    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        self._backbone.extend(features, next_tokens)

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        block = self._backbone.compute_states()
        if temperature == 0:
            return Proposal(self._draft.decode(block, count, lambda logits: logits.argmax(-1))[0])
        drawn_from: list[Tensor] = []

        def sample(logits: Tensor) -> Tensor:
            drawn_from.append(distribution(logits[0], temperature))
            return draw(drawn_from[-1], generator)[None]

        tokens = self._draft.decode(block, count, sample)[0]
        return Proposal(tokens, torch.stack(drawn_from))
