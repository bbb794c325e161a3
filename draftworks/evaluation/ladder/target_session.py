"""Target forward passes over one sequence with a cache that can be rewound, for layers of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from draftworks.config.run_files import TargetFiles
from draftworks.storage.identity import LayerTap

_CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Cache layers that store something for each token, so that the last tokens can be removed."""


@dataclass(frozen=True)
class TargetPass:
    """Output for n tokens: logits (n, V) and features (n, H) by name."""

    logits: Tensor
    features: dict[str, Tensor]


class TargetSession:
    """A target and its cache over one sequence.

    Recurrent layers, such as the gated delta rule of Qwen3-Next and Qwen3.5, cannot forget single tokens: `crop` of
    transformers leaves their state as it is. So their state before a pass is copied, and after a rewind the tokens of
    the pass that remain are computed again.

    Args:
        taps: residual streams to return with the logits.
        rewinds: whether `rewind_to` is called after every `forward`. Layers with a sliding window keep more until then.
        last: return the last hidden states, after the final norm, with the streams.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[LayerTap] = (), rewinds: bool = False, last: bool = False
    ) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._last_hidden = last
        self._cache = DynamicCache(config=model.config)
        self._recurrent = [index for index, layer in enumerate(self._cache.layers) if type(layer) not in _CROPPABLE]
        self._rewinds = rewinds
        self._known = 0
        self._last: tuple[int, ...] = ()
        if rewinds:
            for layer in self._croppable_layers:
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.activate_past_recording()

    @torch.no_grad()
    def forward(self, tokens: Sequence[int]) -> TargetPass:
        """Run the target over the tokens that follow those in the cache."""
        if self._rewinds:
            self._before = {index: deepcopy(self._cache.layers[index]) for index in self._recurrent}
            self._last = tuple(tokens)
        self._known += len(tokens)
        out = self._model(
            input_ids=self._ids(tokens),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(self._taps) or self._last_hidden,
        )
        features = {tap.name: out.hidden_states[tap.hf_index][0] for tap in self._taps}  # (1, n, H) to (n, H)
        if self._last_hidden:
            features["last"] = out.hidden_states[-1][0]
        return TargetPass(out.logits[0], features)

    @torch.no_grad()
    def rewind_to(self, length: int) -> None:
        """Remove all tokens after the first `length`; these must all be of the last pass."""
        rejected, self._known = self._known - length, length
        if not rejected or not self._recurrent:
            self._crop(rejected)
            return
        self._crop(len(self._last))
        for index, layer in self._before.items():
            self._cache.layers[index] = layer
        kept = self._last[: len(self._last) - rejected]
        if kept:
            self._model.base_model(input_ids=self._ids(kept), past_key_values=self._cache, use_cache=True)
            self._crop(0)

    @property
    def _croppable_layers(self) -> list[DynamicLayer]:
        layers = [layer for index, layer in enumerate(self._cache.layers) if index not in self._recurrent]
        return cast(list[DynamicLayer], layers)

    def _crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens; layers with a window shrink to it again, also if `tokens` is 0."""
        for layer in self._croppable_layers:
            layer.crop(-tokens)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self._model.device)  # (1, n)


def has_recurrent_state(target: TargetFiles) -> bool:
    """Whether some layers of a target keep one state for all tokens (recurrent layers). Reads its config.json only."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        target.model, revision=target.revision or "main", trust_remote_code=False
    )
    layers = DynamicCache(config=config).layers
    return any(type(layer) not in _CROPPABLE for layer in layers)
