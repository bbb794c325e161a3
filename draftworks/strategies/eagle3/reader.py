"""The EAGLE-3 chain, step by step, from the weights of an exported draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.sizes import LayerSizes
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class Eagle3Norms:
    """Where the draft normalises beyond its plain form; see the module's description."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Eagle3Reader(ExportReader):
    """A chain of steps, each computed as the last row of a plain causal layer over all rows so far."""

    taps: tuple[LayerTap, ...]
    sizes: LayerSizes
    norms: Eagle3Norms
    window: int | None
    """Of the rows of the text, the newest so many that the chain sees, counted from where it begins: as speculators
    trains. (vLLM counts from each token.)"""
    layer: str
    """Prefix of the decoder layer's tensors."""
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    dtype: torch.dtype

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        states = self.fused(self.joined(features))
        rows = []
        for step in range(len(drawn)):
            tokens = torch.cat([next_tokens, drawn[:step]])
            hidden = self.layer_rows(tokens, states, given=len(next_tokens))[-1]
            normed = self.norm(hidden, "norm")
            rows.append(normed @ self.weights["lm_head.weight"].T)
            states = torch.cat([states, (normed if self.norms.norm_output else hidden)[None]])
        return torch.stack(rows)

    def fused(self, streams: Tensor) -> Tensor:
        """(n, taps · H) to the states (n, H) of the first rows."""
        if self.norms.norm_before_fc:
            streams = self.norm(streams, "input_norm")
        if self.norms.fc_norm:
            chunks = streams.chunk(len(self.taps), dim=-1)
            streams = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return streams @ self.weights["fc.weight"].T

    def layer_rows(self, tokens: Tensor, states: Tensor, given: int) -> Tensor:
        """The decoder layer over rows of a token (m,) and a state (m, H) each, `given` of them of the text; its output
        (m, H)."""
        normed = self.norm(states, f"{self.layer}hidden_norm")
        embedded = self.norm(self.embedding[tokens].to(self.dtype), f"{self.layer}input_layernorm")
        attended = self.attended(torch.cat([embedded, normed], dim=-1), self.layer, given)
        hidden = (normed if self.norms.norm_before_residual else states) + attended
        after = self.norm(hidden, f"{self.layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.weights, f"{self.layer}mlp.")

    def attended(self, inputs: Tensor, layer: str, given: int) -> Tensor:
        """Causal attention of a layer over rows (m, columns of its projections) at positions 0 … m-1: (m, H)."""
        positions = torch.arange(len(inputs))
        heads = {name: split_heads(self._projected(inputs, layer, name), self.sizes.head_dim) for name in "qkv"}
        query, key = (rotate(heads[name], positions, self.sizes.rope) for name in "qk")
        visible = positions[:, None] >= positions[None]
        if self.window is not None:
            begins = positions.clamp(max=given - 1)[:, None]
            visible &= positions[None] > begins - self.window
        return self._projected(attend(query, key, heads["v"], visible), layer, "o")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)

    def _projected(self, x: Tensor, layer: str, name: str) -> Tensor:
        return x @ self.weights[f"{layer}self_attn.{name}_proj.weight"].T
