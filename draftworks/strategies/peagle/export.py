"""Export format of P-EAGLE for speculators and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import build_vllm_commands, list_layer_tensors, read_proposed_tokens, require
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.eagle3.export_speculators import LAYERS, SpeculatorsEagle

_COMPUTED = ("fc_norm", "norm_before_residual", "mask_token_id")
"""Options that decide what the draft computes, under the config's keys. `norm_output` is none of them: it is about what the
next pass is fed, and there is one pass."""


class SpeculatorsPEagle(SpeculatorsEagle):
    """The layout of EAGLE-3 with more layers and `mask_hidden`; the embedding is the draft's own if it has one."""

    name = "speculators_peagle"
    strategy = "peagle"
    algorithm = "peagle"
    architecture = "PEagleSpeculator"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "speculators 0.9.0; and vLLM with parallel drafting of speculators' drafts (#41826; 0.32 and 0.33 have it). "
            "SGLang 0.5.23 has no P-EAGLE."
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return build_vllm_commands(draft, folder, "peagle", self.count_draft_tokens(draft), parallel=True)

    def count_draft_tokens(self, draft: CanonicalDraft) -> int:
        return draft.config["num_depths"]

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        config, options = draft.config, draft.options
        return replace(
            super().derive_shape(draft),
            num_layers=config["num_layers"],
            options={
                "fc_norm": options.fc_norm,
                "norm_before_residual": options.norm_before_residual,
                "mask_token_id": config["mask_token_id"],
                "num_depths": config["num_depths"],
                "sliding_window": options.sliding_window,
            },
            own_embedding=options.train_embeddings,
        )

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. `fc_norm` is also a key of the layers: of the others vLLM passes on only some for P-EAGLE."""
        config = super().build_config(draft, dtype)
        if config["fc_norm"]:
            config[LAYERS]["fc_norm"] = True
        return config

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        shape = self.derive_shape(draft)
        computed = {key: shape.options[key] for key in _COMPUTED}
        fixed = {"norm_before_fc": False, "norm_output": False}
        return {**computed, **fixed, "embed_requires_grad": shape.own_embedding}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        common = self.read_common_shape(config, target)
        windows = set(self.read_windows(config))
        if len(windows) > 1:
            raise ConfigError(
                f"{where}: {LAYERS}: layer_types: peagle drafts here have the same window in all layers, found {windows}"
            )
        if config.get("norm_before_fc"):
            raise ConfigError(f"{where}: norm_before_fc: true: no draft here computes that")
        return DraftShape(
            **common,
            options={
                "fc_norm": bool(config.get("fc_norm")),
                "norm_before_residual": bool(config.get("norm_before_residual")),
                "mask_token_id": require(config, "mask_token_id", where),
                "num_depths": read_proposed_tokens(config, where),
                "sliding_window": windows.pop(),
            },
            own_embedding=bool(config.get("embed_requires_grad", True)),
        )

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        hidden = shape.hidden_size
        names = super().list_expected_tensors(shape) | {"mask_hidden": (1, 1, len(shape.taps) * hidden)}
        for layer in range(1, shape.num_layers):
            names |= list_layer_tensors(f"layers.{layer}.", shape, inputs=hidden)
        return names

    def to_canonical_name(self, name: str) -> str:
        """See the base. Canonical names are the library's."""
        return name.removeprefix("model.")
