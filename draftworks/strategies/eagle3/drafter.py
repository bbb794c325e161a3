"""EAGLE-3's serving form: one sequence, with cached keys and values of step 0, and a chain of the draft's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor

from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.eagle3.model import Eagle3Draft, Heads


class Eagle3Drafter(Drafter):
    """Drafter whose position t reads the target's features at t and the token t+1; the chain begins at the last position.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, model: Eagle3Draft, taps: Sequence[str]) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._last: Heads | None = None
        self._state: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        hidden = self._model.fuse(torch.cat([features[tap] for tap in self._taps], dim=-1)[None])
        heads = self._project(hidden, self._model.embed(next_tokens[None]), start=self._length)
        self._length += len(next_tokens)
        self._keys.append(heads.key)
        self._values.append(heads.value)
        self._last = Heads(heads.query[:, :, -1:], heads.key[:, :, -1:], heads.value[:, :, -1:])
        self._state = hidden[:, -1:]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None or self._state is None:
            raise RuntimeError("propose was called before extend")
        self._keys, self._values = [self._join_seen(self._keys)], [self._join_seen(self._values)]
        keys, values = list(self._keys), list(self._values)
        heads, hidden = self._last, self._state
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(count):
            if step > 0:
                heads = self._project(hidden, self._model.embed(tokens[-1][None, None]), start=self._length - 1 + step)
                keys.append(heads.key)
                values.append(heads.value)
            hidden = self._layer(hidden, Heads(heads.query, torch.cat(keys, dim=2), torch.cat(values, dim=2)))
            output, hidden = self._model.finish_step(hidden)
            logits = self._model.lm_head(output)[0, 0]
            if temperature == 0:
                tokens.append(self._model.draft_ids[logits.argmax()])
            else:
                distributions.append(self._model.to_target_vocab(distribution(logits, temperature)))
                tokens.append(draw(distributions[-1], generator))
        return Proposal(torch.stack(tokens), torch.stack(distributions) if distributions else None)

    def _join_seen(self, parts: list[Tensor]) -> Tensor:
        """Return the keys or values of step 0 that the chain sees: all, or the newest `window`."""
        joined, window = torch.cat(parts, dim=2), self._model.midlayer.attention.window
        return joined if window is None else joined[:, :, -window:]

    def _project(self, hidden: Tensor, embedded: Tensor, start: int) -> Heads:
        """Return the heads of n positions (1, n, H), the first of which has rotary position `start`."""
        layer, length = self._model.midlayer, hidden.shape[1]
        halves = layer.self_attn.split_halves()
        joint = torch.nn.functional.linear(layer.begin_step(hidden).normed, halves.states)
        joint = joint + torch.nn.functional.linear(layer.input_layernorm(embedded), halves.tokens)
        rotation = self._model.rotary(start + length, joint.dtype).window(start, length)
        return layer.self_attn.split_heads(joint, rotation)

    def _layer(self, hidden: Tensor, heads: Heads) -> Tensor:
        layer = self._model.midlayer
        hidden = layer.begin_step(hidden).residual + layer.self_attn.o_proj(layer.self_attn.attend(heads))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
