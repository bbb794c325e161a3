"""DFlash drafts as z-lab publishes them, which is also what SGLang loads."""

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
from draftworks.export.speculators_keys import is_speculators, model_path
from draftworks.strategies.dflash.export import (
    DFlashFormat,
    block_options,
    is_domino,
    is_dspark,
    layer_type_keys,
    read_windows,
    refuse_other_arithmetic,
    refuse_other_strategies,
)


class ZlabDFlash(DFlashFormat):
    name = "zlab_dflash"
    sglang_algorithm = "DFLASH"

    def loaders(self, draft: CanonicalDraft) -> str:
        if draft.options.sliding_window is not None:
            return "SGLang whose DFlash reads `layer_types`: an older one would attend to everything without a word."
        return "SGLang with DFlash (`--speculative-algorithm DFLASH`), and z-lab's own code."

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return {
            "SGLang": f"python -m sglang.launch_server --model-path {model_path(draft.target)} "
            f"--speculative-algorithm {self.sglang_algorithm} --speculative-draft-model-path {folder}"
        }

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        config = draft.config
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": config["num_layers"],
            **layer_keys(draft, dtype),
            **layer_type_keys(draft.options.windows()),
            "block_size": config["block_size"],
            "num_target_layers": config["num_target_layers"],
            "dflash_config": {
                "mask_token_id": config["mask_token_id"],
                "target_layer_ids": to_format(self.name, draft.taps),
            },
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = "DFlashDraftModel" in (config.get("architectures") or [])
        return known and not (is_domino(config) or is_dspark(config) or is_speculators(config))

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        refuse_other_strategies(config, where)
        block = require(config, "dflash_config", where)
        layers = config.get("num_target_layers", target.num_layers)
        if layers != target.num_layers:
            raise ConfigError(f"{where}: num_target_layers {layers}: the target has {target.num_layers} layers")
        sizes = layer_sizes(config, where)
        windows = read_windows(config, sizes["num_layers"], where)
        refuse_other_arithmetic(config, windows, where)
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(block, "target_layer_ids", f"{where}: dflash_config")),
            draft_vocab_size=None,
            options=block_options(
                config.get("block_size") or require(block, "block_size", where),
                require(block, "mask_token_id", f"{where}: dflash_config"),
                windows,
            ),
            **sizes,
        )
