"""Block drafts at work on one sequence whose tokens are said one after the other: DFlash's caches, and a head that speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor, nn

from draftworks.drafts.documents import Documents
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.model import DFlashDraft

ChooseTokens = Callable[[Tensor], Tensor]
"""From logits (n, V) to the tokens (n,) that are proposed."""


class SequentialBlockDraft(nn.Module, ABC):
    """A draft that makes tokens of the states of its backbone's blocks, each knowing those before it."""

    backbone: DFlashDraft

    @abstractmethod
    def decode(self, states: Tensor, known: Tensor, count: int, choose: ChooseTokens) -> Tensor:
        """Token after token of n blocks, (n, count).

        Args:
            states: (n, size, H) of the backbone, not normed.
            known: (n,) int64, the anchors' tokens.
            choose: is asked for every place in turn.
        """

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, features: Tensor, rows: Tensor, count: int, documents: Documents | None = None
    ) -> Tensor:
        """Blocks from many rows at once, each as a server would make it there. As `DFlashDraft.propose`."""

        def first_choices(states: Tensor, known: Tensor) -> Tensor:
            return self.decode(states, known, count, lambda logits: logits.argmax(-1))

        return self.backbone.propose_blocks(input_ids, features, rows, count, first_choices, documents)


class BlockDrafter(Drafter):
    """The backbone makes the block's states once; every token is chosen knowing those before it.

    Args:
        backbone: of the same sequence.
    """

    def __init__(self, speaker: SequentialBlockDraft, backbone: DFlashDrafter) -> None:
        self._speaker = speaker
        self._backbone = backbone
        self._known: Tensor | None = None

    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        self._backbone.extend(features, next_tokens)
        self._known = next_tokens[-1:]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        states = self._backbone.states()[None]
        if temperature == 0:
            return Proposal(self._speaker.decode(states, self._known, count, lambda logits: logits.argmax(-1))[0])
        drawn_from: list[Tensor] = []

        def sampled(logits: Tensor) -> Tensor:
            drawn_from.append(distribution(logits[0], temperature))
            return draw(drawn_from[-1], generator)[None]

        tokens = self._speaker.decode(states, self._known, count, sampled)[0]
        return Proposal(tokens, torch.stack(drawn_from))
