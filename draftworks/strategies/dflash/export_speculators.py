"""DFlash drafts for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape
from draftworks.export.layer_ids import from_format, to_format
from draftworks.export.layer_keys import layer_keys, layer_sizes, require
from draftworks.export.speculators_keys import speculators_keys, vllm_commands
from draftworks.strategies.dflash.export import (
    DFlashFormat,
    block_options,
    layer_type_keys,
    read_windows,
    refuse_part_of_vocabulary,
)
from draftworks.strategies.dflash.options import OTHER_WINDOW


class SpeculatorsDFlash(DFlashFormat):
    name = "speculators_dflash"

    def loaders(self, draft: CanonicalDraft) -> str:
        return "speculators 0.9.0, and vLLM with DFlash."

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return vllm_commands(draft, folder, "dflash", draft.config["block_size"] - 1)

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """`sliding_window_non_causal` is left out: by false, the library's default, vLLM makes full attention causal."""
        config = draft.config
        layer = {
            "model_type": "qwen3",
            "num_hidden_layers": config["num_layers"],
            **layer_keys(draft, dtype),
            **layer_type_keys(draft.options.windows()),
        }
        return {
            "architectures": ["DFlashSpeculator"],
            **speculators_keys("dflash", draft.target, config["block_size"] - 1),
            "transformer_layer_config": layer,
            "draft_vocab_size": config["vocab_size"],
            "block_size": config["block_size"],
            "aux_hidden_state_layer_ids": to_format(self.name, draft.taps),
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": False,
            "tie_word_embeddings": False,
            "dtype": layer["dtype"],
            "torch_dtype": layer["dtype"],
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "dflash"

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        layer = require(config, "transformer_layer_config", where)
        sizes = layer_sizes(layer, f"{where}: transformer_layer_config")
        windows = read_windows(layer, sizes["num_layers"], f"{where}: transformer_layer_config")
        if any(windows):
            raise ConfigError(f"{where}: sliding_window: {OTHER_WINDOW}")
        if config.get("sample_from_anchor"):
            raise ConfigError(f"{where}: sample_from_anchor: true: drafts here take the anchor for a known token")
        refuse_part_of_vocabulary(config, sizes["vocab_size"], self.strategy, where)
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(config, "aux_hidden_state_layer_ids", where)),
            draft_vocab_size=None,
            options=block_options(
                require(config, "block_size", where), require(config, "mask_token_id", where), windows
            ),
            **sizes,
        )
