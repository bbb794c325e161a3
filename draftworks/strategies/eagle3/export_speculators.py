"""Export format of EAGLE-3 for speculators and vLLM, and the base of that of P-EAGLE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import (
    build_layer_keys,
    build_speculators_keys,
    build_vllm_commands,
    read_layer_sizes,
    require,
)
from draftworks.export.conventions import from_format, to_format
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import SLIDING, read_windows
from draftworks.strategies.eagle3.export import (
    NUMBERED_LAYER,
    PLAIN,
    Eagle3Format,
    choose_default_taps,
    count_draft_tokens,
    list_vocabulary_tensors,
    read_computed_options,
    require_one_layer,
)

LAYERS = "transformer_layer_config"
_VLLM_TAPS = 3
"""Number of taps that vLLM takes without `num_aux_hidden_states`: it does not count the ids."""


class SpeculatorsEagle(Eagle3Format):
    """The layout of speculators 0.9.0 and vLLM. It has an embedding; both load a file without one and do not report it.

    Attributes:
        algorithm: the library's name for the strategy.
        architecture: the class name in its files.
    """

    algorithm: str
    architecture: str
    layer_prefix = NUMBERED_LAYER

    @abstractmethod
    def count_draft_tokens(self, draft: CanonicalDraft) -> int:
        """Return the number of tokens that a server is to ask the draft for."""

    @abstractmethod
    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        """Return the keys of config.json that only this strategy has."""

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        found = {"embed_tokens.weight": draft.parts.embedding, **super().build_tensors(draft)}
        mapping = () if _is_reduced(self.derive_shape(draft)) else ("d2t", "t2d")
        return {name: tensor for name, tensor in found.items() if name not in mapping}

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. Llama's config class keeps the keys of a sliding window as they are."""
        shape = self.derive_shape(draft)
        layer = {"model_type": "llama", "num_hidden_layers": shape.num_layers, **build_layer_keys(draft, dtype)}
        window = shape.options["sliding_window"]
        if window is not None:
            kinds = [SLIDING] * shape.num_layers
            layer |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
        if len(draft.taps) != _VLLM_TAPS:
            layer["num_aux_hidden_states"] = len(draft.taps)
        return {
            "architectures": [self.architecture],
            **build_speculators_keys(self.algorithm, draft.target, self.count_draft_tokens(draft)),
            LAYERS: layer,
            "draft_vocab_size": draft.config["draft_vocab_size"],
            **self.build_own_keys(draft),
            "eagle_aux_hidden_state_layer_ids": to_format(self.name, draft.taps),
            "tie_word_embeddings": False,
            "dtype": layer["dtype"],
            "torch_dtype": layer["dtype"],
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == self.algorithm

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        embedding: Shapes = {"embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
        vocabulary = list_vocabulary_tensors(shape) if _is_reduced(shape) else {}
        return super().list_expected_tensors(shape) | embedding | vocabulary

    def read_windows(self, config: Mapping[str, Any]) -> list[int | None]:
        """Return the sliding window of every layer. Raises ConfigError for keys that contradict each other."""
        layer, where = config[LAYERS], f"config.json: {LAYERS}"
        return read_windows(layer, require(layer, "num_hidden_layers", where), where)

    def read_common_shape(self, config: Mapping[str, Any], target: TargetFiles) -> dict[str, Any]:
        """Return what a config.json of either strategy has, as fields of a `DraftShape`.

        Raises:
            ConfigError: a key is missing, or has a value that no draft here computes.
        """
        where = f"config.json: {LAYERS}"
        layer = require(config, LAYERS, "config.json")
        if layer.get("model_type") != "llama":
            raise ConfigError(
                f"{where}: layers of model_type {layer.get('model_type')!r}: {self.strategy} drafts here are llama"
            )
        sizes = read_layer_sizes(layer, where)
        if config.get("target_hidden_size") not in (None, sizes["hidden_size"]):
            raise ConfigError(
                f"config.json: target_hidden_size {config['target_hidden_size']}, hidden_size {sizes['hidden_size']}: "
                "drafts here are as wide as their target"
            )
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        return {
            "strategy": self.strategy,
            "taps": from_format(self.name, ids) if ids else choose_default_taps(target),
            "draft_vocab_size": require(config, "draft_vocab_size", "config.json"),
            **sizes,
        }


def _is_reduced(shape: DraftShape) -> bool:
    """Return whether the vocabulary is reduced: speculators has no mapping in a draft with the full one."""
    return shape.draft_vocab_size != shape.vocab_size


_SAME = ("fc_norm", "norm_before_fc", "norm_before_residual")
"""Options that the library's config has under the same names."""


class SpeculatorsEagle3(SpeculatorsEagle):
    """EAGLE-3 in that layout, with the target's embedding."""

    name = "speculators_eagle3"
    algorithm = "eagle3"
    architecture = "Eagle3Speculator"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        norms = read_computed_options(draft)
        if norms["feedback"] == "post_norm":
            return "speculators 0.9.0; vLLM from #46488 on: older ones do not pass norm_output to the model."
        if norms["fc_norm"]:
            return "speculators 0.9.0; vLLM with EAGLE-3.1 (#42764)."
        return "speculators 0.9.0, and vLLM."

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return build_vllm_commands(draft, folder, "eagle3", self.count_draft_tokens(draft))

    def count_draft_tokens(self, draft: CanonicalDraft) -> int:
        return count_draft_tokens(draft)

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        norms = read_computed_options(draft)
        return {
            **{key: norms[key] for key in _SAME},
            "norm_output": norms["feedback"] == "post_norm",
            "embed_requires_grad": False,
        }

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        common = self.read_common_shape(config, target)
        require(config, "norm_before_residual", f"{where} (speculators takes false then, vLLM true)")
        options = PLAIN | {key: bool(config.get(key)) for key in _SAME}
        options["feedback"] = "post_norm" if config.get("norm_output") else "pre_norm"
        options["sliding_window"] = self.read_windows(config)[0]
        return require_one_layer(DraftShape(**common, options=options), where)
