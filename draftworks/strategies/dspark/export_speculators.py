"""DSpark drafts for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape
from draftworks.export.speculators_keys import speculators_keys, vllm_commands
from draftworks.strategies.dflash.export_speculators import SpeculatorsDFlash
from draftworks.strategies.dspark.export import DSparkHeads, head_keys, read_heads


class SpeculatorsDSpark(DSparkHeads, SpeculatorsDFlash):
    name = "speculators_dspark"

    def loaders(self, draft: CanonicalDraft) -> str:
        if not _vllm_computes(draft):
            return "speculators 0.9.0. Not vLLM, whose DSpark has the vanilla Markov head and no other."
        return (
            "speculators 0.9.0, and vLLM with DSpark that reads `sample_from_anchor` (#48639; 0.26 passed over it and took "
            "the first proposal from another place)."
        )

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return vllm_commands(draft, folder, "dspark", draft.config["block_size"]) if _vllm_computes(draft) else {}

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        return {
            **super().config(draft, dtype),
            "architectures": ["DSparkSpeculator"],
            **speculators_keys("dspark", draft.target, draft.config["block_size"]),
            **head_keys(draft),
            "sample_from_anchor": True,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "dspark"

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        heads = read_heads(config, "config.json")
        backbone = super().shape({**config, "sample_from_anchor": False}, target)
        return replace(backbone, options={**backbone.options, **heads})


def _vllm_computes(draft: CanonicalDraft) -> bool:
    return draft.options.markov_head_type == "vanilla" and draft.options.markov_rank > 0
