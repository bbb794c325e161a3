"""P-EAGLE's serving form: one sequence, with cached keys and values of depth 0; masked places are not cached.

With a window the cache holds its newest positions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from draftworks.drafts.attention import KeyValue
from draftworks.drafts.layers import Rotation
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal
from draftworks.strategies.peagle.model import PEagleDraft, TokenInputs, TokenLayout


class PEagleDrafter(Drafter):
    """Drafter whose position t reads the target's features at t and the token t+1; masked places follow the last position.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, model: PEagleDraft, taps: Sequence[str]) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._cache = [_LayerCache() for _ in model.layers]
        self._length = 0
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        inputs = self._model.make_inputs(torch.cat([features[tap] for tap in self._taps], dim=-1), next_tokens)
        self._last = self._forward(inputs, keeps=True)[-1:]
        self._length += len(next_tokens)

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None:
            raise RuntimeError("propose was called before extend")
        states = self._last
        if count > 1:
            masked = TokenInputs(*(x.expand(count - 1, -1) for x in self._model.make_masked_inputs()))
            states = torch.cat([states, self._forward(masked, keeps=False)])
        logits = self._model.lm_head(states)
        if temperature == 0:
            return Proposal(self._model.draft_ids[logits.argmax(-1)])
        probabilities = self._model.to_target_vocab(distribution(logits, temperature))
        return Proposal(torch.stack([draw(one, generator) for one in probabilities]), probabilities)

    def _forward(self, inputs: TokenInputs, keeps: bool) -> Tensor:
        """Return the normed states (n, H) of tokens after those in the cache; each sees all before it, or its window."""
        model, count = self._model, len(inputs.hidden)
        rotation = model.rotary(self._length + count, inputs.hidden.dtype).window(self._length, count)
        layouts = [_CachedLayout(cache, rotation, model.head_dim, model.window, keeps) for cache in self._cache]
        return model.run_layers(inputs, layouts)


@dataclass
class _LayerCache:
    """Keys and values of the positions of depth 0 so far, or of the newest `window`; None before the first."""

    known: KeyValue | None = None

    def concat(self, news: KeyValue) -> KeyValue:
        return news if self.known is None else self.known.concat(news)


@dataclass(frozen=True)
class _CachedLayout(TokenLayout):
    """New tokens after those in a cache, causal. `keeps`: they are added to the cache."""

    cache: _LayerCache
    rotation: Rotation
    width: int
    window: int | None
    keeps: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, (-1, self.width)).transpose(0, 1)[None] for x in (query, key, value))
        everything = self.cache.concat(KeyValue(self.rotation.apply(key), value))
        news, total = query.shape[2], everything.key.shape[2]
        window = total if self.window is None else self.window
        if self.keeps:
            self.cache.known = everything.select(slice(max(total - window, 0), None))
        # A prompt is long and first: its mask is square, and without a window it is never materialised.
        begins = news == total <= window
        seen = None if begins else _make_causal_mask(news, total, window, query.device)
        attended = F.scaled_dot_product_attention(
            self.rotation.apply(query), *everything, attn_mask=seen, is_causal=begins, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)

    def expand_states(self, x: Tensor) -> Tensor:
        return x


def _make_causal_mask(news: int, total: int, window: int, device: torch.device) -> Tensor:
    """Return which of `total` positions each of the last `news` sees, (news, total) bool: the newest `window` up to itself."""
    offset = total - news
    return torch.ones(news, total, dtype=torch.bool, device=device).tril(offset).triu(offset - window + 1)
