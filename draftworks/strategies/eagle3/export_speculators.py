"""EAGLE-3 drafts for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape
from draftworks.export.layer_keys import require
from draftworks.export.speculators_keys import vllm_commands
from draftworks.strategies.dflash.export import SLIDING
from draftworks.strategies.eagle3.export import PLAIN, computed_options, draft_tokens, one_layer
from draftworks.strategies.eagle3.export_speculators_base import LAYERS, SpeculatorsEagle

_SAME = ("fc_norm", "norm_before_fc", "norm_before_residual")
"""Options that the library's config has under the same names."""


class SpeculatorsEagle3(SpeculatorsEagle):
    """With the target's embedding."""

    name = "speculators_eagle3"
    algorithm = "eagle3"
    architecture = "Eagle3Speculator"

    def loaders(self, draft: CanonicalDraft) -> str:
        norms = computed_options(draft)
        if norms["feedback"] == "post_norm":
            return "speculators 0.9.0; vLLM from #46488 on: older ones do not pass norm_output to the model."
        if norms["fc_norm"]:
            return "speculators 0.9.0; vLLM with EAGLE-3.1 (#42764)."
        return "speculators 0.9.0, and vLLM."

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return vllm_commands(draft, folder, "eagle3", self.draft_tokens(draft))

    def draft_tokens(self, draft: CanonicalDraft) -> int:
        return draft_tokens(draft)

    def own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        norms = computed_options(draft)
        return {
            **{key: norms[key] for key in _SAME},
            "norm_output": norms["feedback"] == "post_norm",
            "embed_requires_grad": False,
        }

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """The class of Llama's configurations hands on the keys of a window as they are."""
        config, window = super().config(draft, dtype), computed_options(draft)["sliding_window"]
        if window is not None:
            config[LAYERS] |= {"layer_types": [SLIDING], "sliding_window": window, "use_sliding_window": True}
        return config

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        common = self.common_shape(config, target)
        require(config, "norm_before_residual", f"{where} (speculators takes false then, vLLM true)")
        options = PLAIN | {key: bool(config.get(key)) for key in _SAME}
        options["feedback"] = "post_norm" if config.get("norm_output") else "pre_norm"
        options["sliding_window"] = self.windows(config)[0]
        return one_layer(DraftShape(**common, options=options), where)
