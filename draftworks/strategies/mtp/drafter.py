"""The serving form of an MTP layer: one sequence, with cached keys of the first step, and a chain of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.mtp.model import KeyCache, MtpDraft


class MtpDrafter(Drafter):
    """Drafter whose position t reads the target's last state at t and the token t+1; the chain begins at the last position."""

    def __init__(self, model: MtpDraft) -> None:
        self._model = model
        self._seen = KeyCache()
        self._length = 0
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        self._last = self._step(features["last"], next_tokens, self._length, self._seen)[-1:]
        self._length += len(next_tokens)

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None:
            raise RuntimeError("propose was called before extend")
        seen, state, head = self._seen.fork(), self._last, self._model.target_head
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(count):
            if step > 0:
                state = self._step(state, tokens[-1][None], self._length - 1 + step, seen)
            logits = F.linear(state[0], head)
            if temperature == 0:
                tokens.append(logits.argmax())
            else:
                distributions.append(distribution(logits, temperature))
                tokens.append(draw(distributions[-1], generator))
        return Proposal(torch.stack(tokens), torch.stack(distributions) if distributions else None)

    def _step(self, states: Tensor, tokens: Tensor, start: int, seen: KeyCache) -> Tensor:
        """Return the normed states (n, H) of rows from position `start` on, which sees as many rows before it."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        visible = positions[:, None] >= torch.arange(start + len(tokens), device=tokens.device)  # (n, start + n)
        return self._model.step(states[None], tokens[None], positions, visible, seen)[0]
