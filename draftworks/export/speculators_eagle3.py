"""EAGLE-3 drafts for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.eagle3_format import (
    NUMBERED_LAYER,
    Eagle3Format,
    default_taps,
    draft_tokens,
    norm_options,
    one_layer,
    refuse_other_norms,
    vocabulary_shapes,
)
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.layer_ids import from_format, to_format
from draftworks.export.layer_keys import layer_keys, layer_sizes, require
from draftworks.export.speculators_keys import speculators_keys, vllm_commands
from draftworks.runs import TargetFiles


class SpeculatorsEagle3(Eagle3Format):
    """As speculators 0.9.0 and vLLM read it: with the target's embedding, which neither of them misses if it is not there."""

    name = "speculators_eagle3"
    layer_prefix = NUMBERED_LAYER

    def loaders(self, draft: CanonicalDraft) -> str:
        norms = norm_options(draft)
        if norms["feedback"] == "post_norm":
            return "speculators 0.9.0; vLLM from #46488 on: older ones do not pass norm_output to the model."
        if norms["fc_norm"]:
            return "speculators 0.9.0; vLLM with EAGLE-3.1 (#42764)."
        return "speculators 0.9.0, and vLLM."

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return vllm_commands(draft, folder, "eagle3", draft_tokens(draft))

    def tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        found = super().tensors(draft) | {"embed_tokens.weight": draft.parts.embedding}
        mapping = () if _is_reduced(self.described(draft)) else ("d2t", "t2d")
        return {name: tensor for name, tensor in found.items() if name not in mapping}

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        norms = norm_options(draft)
        layer = {"model_type": "llama", "num_hidden_layers": 1, **layer_keys(draft, dtype)}
        return {
            "architectures": ["Eagle3Speculator"],
            **speculators_keys("eagle3", draft.target, draft_tokens(draft)),
            "transformer_layer_config": layer,
            "draft_vocab_size": draft.config["draft_vocab_size"],
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": norms["fc_norm"],
            "norm_output": norms["feedback"] == "post_norm",
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": to_format(self.name, draft.taps),
            "tie_word_embeddings": False,
            "dtype": layer["dtype"],
            "torch_dtype": layer["dtype"],
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        layer = require(config, "transformer_layer_config", where)
        refuse_other_norms(config, where)
        require(config, "norm_before_residual", f"{where} (speculators takes false then, vLLM true)")
        if layer.get("model_type") != "llama":
            raise ConfigError(
                f"{where}: layers of model_type {layer.get('model_type')!r}: EAGLE-3 drafts here are llama"
            )
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        feedback = "post_norm" if config.get("norm_output") else "pre_norm"
        return one_layer(
            DraftShape(
                strategy=self.strategy,
                taps=from_format(self.name, ids) if ids else default_taps(target),
                draft_vocab_size=require(config, "draft_vocab_size", where),
                options={"fc_norm": bool(config.get("fc_norm")), "norm_output": True, "feedback": feedback},
                **layer_sizes(layer, f"{where}: transformer_layer_config"),
            ),
            where,
        )

    def expected_tensors(self, shape: DraftShape) -> Shapes:
        embedding: Shapes = {"embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
        vocabulary = vocabulary_shapes(shape) if _is_reduced(shape) else {}
        return super().expected_tensors(shape) | embedding | vocabulary


def _is_reduced(shape: DraftShape) -> bool:
    """speculators has no mapping in a draft that says all of the target's tokens."""
    return shape.draft_vocab_size != shape.vocab_size
