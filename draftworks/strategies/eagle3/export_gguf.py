"""Export format of EAGLE-3 for llama.cpp: `llm_arch` eagle3 of b11434 (src/models/eagle3.cpp).

The rows of queries and keys are in the order of Llama's files there, in which rope turns neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import require
from draftworks.export.conventions import from_format, to_format
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.gguf_format import LAYER, GgufFormat, require_kind
from draftworks.export.readers.gguf_file import DRAFT_FILE
from draftworks.strategies.eagle3.export import (
    CANONICAL_LAYER,
    PLAIN,
    Eagle3Format,
    count_draft_tokens,
    read_computed_options,
)

_OWN = ("norm_before_residual", "norm_before_fc")
_OUTER = {"norm": "output_norm", "lm_head": "output", "fc": "fc", "input_norm": "enc.output_norm"}
_INNER = {**LAYER, "hidden_norm": "attn_norm_2"}
_NAMES = {
    **{f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _OUTER.items()},
    **{f"{CANONICAL_LAYER}{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in _INNER.items()},
}
"""Names of a draft's tensors in the file, by those that our own have."""


class GgufEagle3(GgufFormat, Eagle3Format):
    """llama.cpp's own EAGLE-3: three taps, one layer, the state before the norm fed back."""

    name = "gguf_eagle3"
    architecture = "eagle3"
    spec_type = "draft-eagle3"
    divides_rope = True
    layer_prefix = CANONICAL_LAYER

    def count_proposals(self, draft: CanonicalDraft) -> int:
        return count_draft_tokens(draft)

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        return replace(super().derive_shape(draft), rope=self.simplify_rope(draft))

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        options = read_computed_options(draft)
        return {
            f"{self.architecture}.target_layers": to_format(self.name, draft.taps),
            f"{self.architecture}.target_hidden_size": draft.config["hidden_size"],
            **{f"{self.architecture}.{name}": options[name] for name in _OWN},
        }

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        weights, head_dim = draft.weights, draft.config["head_dim"]
        found: dict[str, Tensor] = {_NAMES[name]: weights[name] for name in weights if name in _NAMES}
        for part in ("attn_q", "attn_k"):
            found[f"blk.0.{part}.weight"] = _interleave(found[f"blk.0.{part}.weight"], head_dim)
        offsets = weights["d2t"]
        ids = offsets + torch.arange(len(offsets), device=offsets.device)
        return {**found, "d2t": ids, **self.build_rope_tensors(draft)}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        require_kind(config, self.architecture, target)
        prefix = f"{self.architecture}."
        options = {name: require(config, prefix + name, DRAFT_FILE) for name in _OWN}
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(config, f"{prefix}target_layers", DRAFT_FILE)),
            options=PLAIN | options,
            **self.read_sizes(config),
        )

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        found = {_NAMES[name]: size for name, size in super().list_expected_tensors(shape).items()}
        return found | {"d2t": (shape.draft_vocab_size or shape.vocab_size,)} | self.list_rope_tensors(shape)


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows (heads · D, columns) with the halves of each head in turn, as `LlamaModel.permute` of llama.cpp's converter."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
