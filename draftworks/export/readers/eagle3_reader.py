"""The EAGLE-3 chain, step by step, from the weights of an exported draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.sizes import LayerSizes
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.identity import LayerTap


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
    layer: str
    """Prefix of the decoder layer's tensors."""
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    dtype: torch.dtype

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        states = self._fused(self.joined(features))
        rows = []
        for step in range(len(drawn)):
            tokens = torch.cat([next_tokens, drawn[:step]])
            hidden = self._last_row(self.embedding[tokens].to(self.dtype), states)
            normed = self._norm(hidden, "norm")
            rows.append(normed @ self.weights["lm_head.weight"].T)
            states = torch.cat([states, (normed if self.norms.norm_output else hidden)[None]])
        return torch.stack(rows)

    def _fused(self, streams: Tensor) -> Tensor:
        """(n, taps · H) to the states (n, H) of the first rows."""
        if self.norms.norm_before_fc:
            streams = self._norm(streams, "input_norm")
        if self.norms.fc_norm:
            chunks = streams.chunk(len(self.taps), dim=-1)
            streams = torch.cat([self._norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return streams @ self.weights["fc.weight"].T

    def _last_row(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The decoder layer over rows of (token, state), (m, H) each; its output (H,) in the last one."""
        normed = self._norm(states, f"{self.layer}hidden_norm")
        joint = torch.cat([self._norm(embedded, f"{self.layer}input_layernorm"), normed], dim=-1)
        residual = (normed if self.norms.norm_before_residual else states)[-1]
        positions = torch.arange(len(joint))
        query, key = (self._heads(joint, name, positions) for name in ("q_proj", "k_proj"))
        value = split_heads(self._projected(joint, "v_proj"), self.sizes.head_dim)
        visible = positions[:, None] >= positions[None]
        attended = attend(query, key, value, visible)[-1]
        hidden = residual + self._projected(attended, "o_proj")
        after = self._norm(hidden, f"{self.layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.weights, f"{self.layer}mlp.")

    def _heads(self, joint: Tensor, name: str, positions: Tensor) -> Tensor:
        return rotate(split_heads(self._projected(joint, name), self.sizes.head_dim), positions, self.sizes.rope)

    def _projected(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{self.layer}self_attn.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)
