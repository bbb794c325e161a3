"""LiLiCorr from exported files: the candidates of a DFlash block, scored by a transformer over all of them.

Candidate j of place s is a node. All nodes attend to each other; a bias for each head depends on the difference of their places
only. A node's vector `in` is compared with the vector `out` of the node chosen before, or of the anchor: the cosine, times
`lilicorr_logit_scale`, is its logit. Tokens that are no candidates have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import rms_norm
from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import HeadReader, read_zlab
from draftworks.strategies.dflash2.reader import convolve

LAYER_NORM_EPS = 1e-5
"""The default of torch's LayerNorm, which no config names."""


@dataclass(frozen=True)
class LatticeSettings:
    """Numbers of the config that no tensor tells."""

    candidates: int
    heads: int
    layers: int
    logit_scale: float
    vector_eps: float


@dataclass(frozen=True)
class LiLiCorrReader(HeadReader):
    lattice: LatticeSettings

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        rows = self.backbone.proposing_rows(features, next_tokens, self.backbone.block_size - 1)  # (s, H)
        all_logits = rows @ self.backbone.head.T
        tokens = all_logits.topk(self.lattice.candidates).indices  # (s, k)
        log_probs = all_logits.log_softmax(-1).gather(1, tokens)
        anchor = self._affine("context_proj", self.backbone.fuse_context(features)[-1])
        anchor = self._norm(anchor, "anchor_norm")
        nodes = self._run(self._describe_nodes(tokens, log_probs, rows))
        leaving, entering = self._point(nodes, anchor)
        before = self._unit(self._affine("anchor_out_head", anchor))
        result = []
        for place, token in enumerate(drawn.tolist()):
            logits = torch.full_like(all_logits[0], -math.inf)
            logits[tokens[place]] = self.lattice.logit_scale * (entering[place] @ before)
            result.append(logits)
            # A token that is no candidate leads nowhere; what follows is then as after the first.
            before = leaving[place][int((tokens[place] == token).long().argmax())]
        return torch.stack(result)

    def _describe_nodes(self, tokens: Tensor, log_probs: Tensor, rows: Tensor) -> Tensor:
        """Return what the transformer begins with, (s, k, h)."""
        places, count = tokens.shape
        rank = torch.arange(count).to(log_probs)
        columns = [
            log_probs,
            log_probs.exp(),
            log_probs - log_probs.max(1, keepdim=True).values,
            (rank / max(count - 1, 1)).expand(places, count),
            (rank == 0).to(log_probs).expand(places, count),
        ]
        described = torch.stack(columns, dim=-1)
        centred = described - described.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS).sqrt()
        normed = centred / spread * self._weight("feature_norm.weight") + self._weight("feature_norm.bias")
        embedded = self.backbone.embedding[tokens]
        if "lilicorr.token_proj.weight" in self.backbone.weights:
            embedded = self._affine("token_proj", embedded)
        of_rows = self._affine("pass_hidden_proj", rows)[:, None]
        where = self._weight("slot_embedding")[0, 0] + self._weight("rank_embedding")[0, 0]
        return embedded + of_rows + self._mlp("feature_mlp", normed) + where

    def _run(self, nodes: Tensor) -> Tensor:
        """Return the nodes (s, k, h) after all layers."""
        places, count, _ = nodes.shape
        place = torch.arange(places).repeat_interleave(count)
        difference = place[:, None] - place
        bias = self._weight("relative_slot_bias")[:, difference + self.backbone.block_size - 1]
        bias = bias + self._weight("same_slot_bias")[:, None, None] * (difference == 0)
        flat = nodes.flatten(0, 1)
        for layer in range(self.lattice.layers):
            name = f"layers.{layer}."
            flat = flat + self._attend(name, self._norm(flat, f"{name}attn_norm"), bias)
            flat = flat + self._mlp(f"{name}mlp", self._norm(flat, f"{name}mlp_norm"))
        return self._norm(flat, "output_norm").unflatten(0, (places, count))

    def _attend(self, layer: str, x: Tensor, bias: Tensor) -> Tensor:
        weight, added = self._weight(f"{layer}attn.in_proj_weight"), self._weight(f"{layer}attn.in_proj_bias")
        query, key, value = (
            part.unflatten(-1, (self.lattice.heads, -1)).transpose(0, 1) for part in (x @ weight.T + added).chunk(3, -1)
        )
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]) + bias
        return self._affine(f"{layer}attn.out_proj", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def _point(self, nodes: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors `out` and `in` of all nodes, (s, k, F) each."""
        around = anchor.expand_as(nodes)
        joined = self._affine("factor_input_proj", torch.cat([nodes, around, nodes * around], dim=-1))
        factors = joined * joined.sigmoid()
        return self._unit(self._affine("out_head", factors)), self._unit(self._affine("in_head", factors))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        up = self._affine(f"{name}.up_proj", x)
        return self._affine(f"{name}.down_proj", up * up.sigmoid())

    def _affine(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weight(f"{name}.weight").T + self._weight(f"{name}.bias")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weight(f"{name}.weight"), self.backbone.sizes.eps)

    def _unit(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(self.lattice.vector_eps)

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[f"lilicorr.{name}"]


def read_sglang_lilicorr(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> LiLiCorrReader:
    """Read a draft as SGLang does."""
    backbone = read_zlab(folder, target, dtype, "sglang_lilicorr", first_row=1)
    if "layers.0.attention_conv.base_kernel" in backbone.weights:
        taps, channels = (folder.require_setting(f"dflash_config.conv_{size}_size") for size in ("kernel", "group"))
        backbone = convolve(backbone, taps, channels)

    def setting(name: str):
        return folder.require_setting(f"dflash_config.lilicorr_{name}")

    settings = LatticeSettings(
        candidates=setting("candidate_topk"),
        heads=setting("num_heads"),
        layers=setting("num_layers"),
        logit_scale=setting("logit_scale"),
        vector_eps=setting("vector_eps"),
    )
    return LiLiCorrReader(backbone, settings)
