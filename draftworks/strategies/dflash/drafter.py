"""The serving form of block drafts: one sequence, with cached keys and values of the context, and one block after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Generator, Tensor

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.attention import DraftAttention, KeyValue
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.dflash.model import BlockDraft, BlockStates, DFlashDraft, DFlashLayer


class BlockDrafter(Drafter):
    """Drafter whose context is the target's features so far; the anchor is the token after them.

    The backbone computes a block's states once, then tokens are decoded one after another.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, draft: BlockDraft, taps: Sequence[str]) -> None:
        self._draft, self._model = draft, draft.backbone
        self._taps = tuple(taps)
        self._length = 0
        self._context: list[KeyValue] = []
        self._anchor: Tensor | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        model, count = self._model, len(next_tokens)
        context = model.fuse_context(torch.cat([features[tap] for tap in self._taps], dim=-1)[None])
        rotation = model.rotary(self._length + count, context.dtype).window(self._length, count)
        new = [layer.self_attn.project_key_value(context, rotation) for layer in _layers(model)]
        self._context = [old.concat(fresh) for old, fresh in zip(self._context, new)] if self._context else new
        self._length += count
        self._anchor, self._last = next_tokens[-1:], context[:, -1]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        block = self.compute_states()
        if temperature == 0:
            return Proposal(self._draft.decode(block, count, lambda logits: logits.argmax(-1))[0])
        drawn_from: list[Tensor] = []

        def sample(logits: Tensor) -> Tensor:
            drawn_from.append(distribution(logits[0], temperature))
            return draw(drawn_from[-1], generator)[None]

        tokens = self._draft.decode(block, count, sample)[0]
        return Proposal(tokens, torch.stack(drawn_from))

    @torch.no_grad()
    def compute_states(self) -> BlockStates:
        """Return the block that begins at the last known token, n = 1."""
        if self._anchor is None or self._last is None:
            raise RuntimeError("propose was called before extend")
        model = self._model
        where = torch.tensor([[self._length]], device=self._anchor.device)
        block = Blocks(where, torch.ones_like(where, dtype=torch.bool), model.block_size)
        rotation = model.get_rotation(block.positions, self._length + model.block_size)
        hidden, attend = model.embed_blocks(self._anchor[None]), DraftAttention(block.make_seen_keys(self._length))
        for layer, context in zip(_layers(model), self._context, strict=True):
            hidden = layer.forward_cached(hidden, context, rotation, attend)
        return BlockStates(hidden, self._anchor, self._last)


def _layers(model: DFlashDraft) -> list[DFlashLayer]:
    return cast("list[DFlashLayer]", list(model.layers))
