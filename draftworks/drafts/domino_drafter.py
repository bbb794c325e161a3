"""Domino at work on one sequence: DFlash's caches, and tokens said one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from draftworks.drafts.dflash_drafter import DFlashDrafter
from draftworks.drafts.domino_model import DominoDraft
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal


class DominoDrafter(Drafter):
    """The backbone makes the block's states once; every token is chosen knowing those before it.

    Args:
        backbone: of the same sequence.
    """

    def __init__(self, model: DominoDraft, backbone: DFlashDrafter) -> None:
        self._model = model
        self._backbone = backbone
        self._known: Tensor | None = None

    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        self._backbone.extend(features, next_tokens)
        self._known = next_tokens[-1:]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        states = self._backbone.states()[None]
        if temperature == 0:
            return Proposal(self._model.say(states, self._known, count, lambda logits: logits.argmax(-1))[0])
        drawn_from: list[Tensor] = []

        def sampled(logits: Tensor) -> Tensor:
            drawn_from.append(distribution(logits[0], temperature))
            return draw(drawn_from[-1], generator)[None]

        tokens = self._model.say(states, self._known, count, sampled)[0]
        return Proposal(tokens, torch.stack(drawn_from))
