"""DSpark drafts in z-lab's layout: DFlash's files with the heads, as SGLang and SpecForge have them, read from DeepSpec and ModelOpt too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape
from draftworks.export.speculators_keys import is_speculators
from draftworks.strategies.dflash.export import (
    head_settings,
    is_dspark,
    refuse_part_of_vocabulary,
    without_head,
)
from draftworks.strategies.dflash.export_zlab import ZlabDFlash
from draftworks.strategies.dspark.export import HEAD_KEYS, DSparkHeads, head_keys, read_heads

_CLASS_NAME = "DSparkDraftModel"
"""Of SpecForge, and one of those that SGLang loads."""
_MOVED = ("mask_token_id", "target_layer_ids")
"""DeepSpec has these beside `dflash_config`, which it does not have."""


class ZlabDSpark(DSparkHeads, ZlabDFlash):
    """The keys of the heads are written twice: SGLang builds them by those beside `dflash_config`, others look inside."""

    name = "zlab_dspark"
    sglang_algorithm = "DSPARK"

    def loaders(self, draft: CanonicalDraft) -> str:
        modes = (
            "it looks at the confidences only where SGLANG_RAGGED_VERIFY_MODE is not `static`, the default"
            if draft.options.confidence_head
            else "SGLANG_RAGGED_VERIFY_MODE has to stay `static`, the default: the other modes need a confidence head"
        )
        return (
            f"SGLang 0.5.23 with DSpark (`--speculative-algorithm DSPARK`), on CUDA, NPU or XPU only; {modes}. "
            "SpecForge 0.2.0, to go on training."
        )

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        config, heads = super().config(draft, dtype), head_keys(draft)
        # SpecForge takes heads without grouping for a mistake unless it is told.
        attention = "mha" if config["num_attention_heads"] == config["num_key_value_heads"] else "gqa"
        inside = {**config["dflash_config"], "projector_type": "dspark", "attention_mode": attention, **heads}
        return {
            **config,
            "architectures": [_CLASS_NAME],
            **heads,
            "sample_from_anchor": True,
            "dflash_config": inside,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return is_dspark(config) and not is_speculators(config)

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        settings = head_settings(config, (*HEAD_KEYS, "projector_type", *_MOVED), where)
        backbone_config = without_head(config, settings)
        backbone_config["dflash_config"] |= {key: settings[key] for key in _MOVED if key in settings}
        backbone = super().shape(backbone_config, target)
        refuse_part_of_vocabulary(config, backbone.vocab_size, self.strategy, where)
        return replace(backbone, options={**backbone.options, **read_heads(settings, where)})
