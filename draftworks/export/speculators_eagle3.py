"""EAGLE-3 drafts for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.eagle3_format import draft_tokens, norm_options, one_layer, refuse_other_norms
from draftworks.export.export_format import DraftShape
from draftworks.export.layer_keys import require
from draftworks.export.speculators_eagle import SpeculatorsEagle
from draftworks.export.speculators_keys import vllm_commands
from draftworks.runs import TargetFiles


class SpeculatorsEagle3(SpeculatorsEagle):
    """With the target's embedding."""

    name = "speculators_eagle3"
    algorithm = "eagle3"
    architecture = "Eagle3Speculator"

    def loaders(self, draft: CanonicalDraft) -> str:
        norms = norm_options(draft)
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
        norms = norm_options(draft)
        return {
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": norms["fc_norm"],
            "norm_output": norms["feedback"] == "post_norm",
            "embed_requires_grad": False,
        }

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        common = self.common_shape(config, target)
        refuse_other_norms(config, where)
        require(config, "norm_before_residual", f"{where} (speculators takes false then, vLLM true)")
        feedback = "post_norm" if config.get("norm_output") else "pre_norm"
        options = {"fc_norm": bool(config.get("fc_norm")), "norm_output": True, "feedback": feedback}
        return one_layer(DraftShape(**common, options=options), where)
