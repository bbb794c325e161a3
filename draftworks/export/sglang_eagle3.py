"""EAGLE-3 drafts for SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.eagle3_format import (
    CANONICAL_LAYER,
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
from draftworks.export.speculators_keys import is_speculators, model_path
from draftworks.runs import TargetFiles

_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token")
"""Keys of vLLM's P-EAGLE drafts, whose class name is EAGLE-3's."""
_NEWER_SGLANG = "SGLang with pull request #24663 (May 2026) or later"


class SglangEagle3(Eagle3Format):
    """As SGLang's `LlamaForCausalLMEagle3` reads it; SpecForge's and ModelOpt's checkpoints are near relatives."""

    name = "sglang_eagle3"
    layer_prefix = CANONICAL_LAYER

    def loaders(self, draft: CanonicalDraft) -> str:
        news = []
        if norm_options(draft)["fc_norm"]:
            news.append("fc_norm")
        if len(draft.taps) != 3:
            news.append(f"{len(draft.taps)} taps")
        if not news:
            return "Any SGLang with EAGLE-3: one layer under the name `midlayer`, three taps."
        return (
            f"{_NEWER_SGLANG}: older ones do not know {' and '.join(news)}, and would load this draft without a word."
        )

    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        tokens = draft_tokens(draft)
        return {
            "SGLang": f"python -m sglang.launch_server --model-path {model_path(draft.target)} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {folder} "
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        }

    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """`target_hidden_size` is left out where it is the draft's own: SGLang asks only whether the key is there.

        `norm_output` is written where there is `fc_norm`: such a draft comes from a family whose defaults differ.
        """
        ids = to_format(self.name, draft.taps)
        newer = {"fc_norm": True, "norm_output": False, "num_aux_hidden_states": len(ids)}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **layer_keys(draft, dtype),
            "draft_vocab_size": draft.config["draft_vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
            **(newer if norm_options(draft)["fc_norm"] else {}),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "LlamaForCausalLMEagle3" in (config.get("architectures") or []) and not is_speculators(config)

    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where, eagle = "config.json", config.get("eagle_config") or {}
        parallel = [key for key in _PARALLEL if config.get(key) is not None]
        if parallel:
            raise ConfigError(
                f"{where}: {', '.join(parallel)}: a P-EAGLE draft, which can be imported from the speculators format only"
            )
        if config.get("norm_output"):
            raise ConfigError(
                f"{where}: norm_output: true means two things: SpecForge before its #879 normed what the head reads, SGLang "
                "norms what the next step is fed. For a draft of the former set it to false; the latter can be imported "
                "from the speculators format"
            )
        refuse_other_norms(config, where)
        if config.get("target_hidden_size") not in (None, config.get("hidden_size")):
            raise ConfigError(
                f"{where}: target_hidden_size {config['target_hidden_size']}: drafts here are as wide as it"
            )
        ids = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
        fc_norm = bool(config.get("fc_norm") or config.get("use_aux_norm"))
        return one_layer(
            DraftShape(
                strategy=self.strategy,
                taps=from_format(self.name, ids) if ids else default_taps(target),
                draft_vocab_size=config.get("draft_vocab_size") or require(config, "vocab_size", where),
                options={"fc_norm": fc_norm, "norm_output": True, "feedback": "pre_norm"},
                **layer_sizes(config, where),
            ),
            where,
        )

    def expected_tensors(self, shape: DraftShape) -> Shapes:
        """`d2t` and `t2d` also where the draft says all of the target's tokens: they are the identity then."""
        return super().expected_tensors(shape) | vocabulary_shapes(shape)
