"""Export format of DSpark for llama.cpp: that of DFlash, with a vanilla Markov head and the confidences that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import require
from draftworks.export.readers.gguf_file import DRAFT_FILE
from draftworks.strategies.dflash.export_gguf import GgufDFlashFormat
from draftworks.strategies.dspark.export import DSparkHeads

_RANK, _CONFIDENCE = "draftworks.markov_rank", "has_confidence_head"


class GgufDSpark(GgufDFlashFormat, DSparkHeads):
    name = "gguf_dspark"
    spec_type = "draft-dspark"
    parts = {
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "conf_proj.weight",
        "confidence_head.proj.bias": "conf_proj.bias",
    }

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        return {
            **super().build_own_keys(draft),
            f"{self.architecture}.sample_from_anchor": True,
            f"{self.architecture}.{_CONFIDENCE}": draft.options.confidence_head,
            _RANK: draft.options.markov_rank,
        }

    def read_head_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        confidence = require(config, f"{self.architecture}.{_CONFIDENCE}", DRAFT_FILE)
        return {
            "markov_head_type": "vanilla",
            "markov_rank": require(config, _RANK, DRAFT_FILE),
            "confidence_head": confidence,
            "confidence_with_markov": True,
        }
