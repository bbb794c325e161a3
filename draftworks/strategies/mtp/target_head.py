"""The target's own multi-token-prediction (MTP) layer: its module from transformers, and its weights from the target's files."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.weight_files import WeightFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import read_json
from draftworks.storage.words import list_names
from draftworks.strategies.mtp.head_names import DEEPSEEK_KINDS, QWEN_KINDS, HeadNames, stack_experts
from draftworks.targets.safetensors_headers import ModelFiles
from draftworks.targets.weights import read_model_config

_LAYER_SETTINGS = {
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
}
"""Settings by which the first layer of a model is what its MTP layer is: full attention, and experts if there are any."""


@dataclass(frozen=True)
class HeadModules:
    """Modules of the target's model class, the norms and the layer on device meta.

    Attributes:
        config: of a model with this one layer, which the layer reads when it runs.
        rotary: gives cosines and sines of positions; not on device meta, and without weights.
    """

    config: Any
    layer: nn.Module
    norms: tuple[nn.Module, nn.Module, nn.Module]
    rotary: nn.Module

    def list_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a draft of these modules, on device meta, by the draft's names."""
        width = self.config.hidden_size
        found = {"fc.weight": torch.empty(width, 2 * width, device="meta")}
        for prefix, module in zip(("hidden_norm", "token_norm", "norm", "layer"), (*self.norms, self.layer)):
            found |= {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}
        return found


def build_modules(text_config: Any) -> HeadModules:
    """Build a layer and three norms of the model class of a text config, in fp32."""
    from transformers import AutoModel

    config = copy.deepcopy(text_config)
    config.num_hidden_layers = 1
    for name, value in _LAYER_SETTINGS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._attn_implementation = "sdpa"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
        hidden, token, final = (copy.deepcopy(model.norm) for _ in range(3))
    return HeadModules(model.config, model.layers[0], (hidden, token, final), type(model.rotary_emb)(model.config))


@dataclass(frozen=True)
class TargetHead:
    """What is known of a target's MTP layer without reading its weights.

    Attributes:
        config: the target's text config.
    """

    files: TargetFiles
    config: Any
    names: HeadNames

    @classmethod
    def find(cls, files: TargetFiles | None) -> TargetHead:
        """Return the MTP layer of a target.

        Raises:
            ConfigError: the target's model type has none, or not one that is known here.
        """
        if files is None:
            raise ConfigError("mtp: the target's MTP layer is read from its files: expected a target with files")
        config = read_model_config(files)
        if isinstance(config, str):
            raise ConfigError(f"target {files.name}: strategy mtp: {config}")
        config = config.get_text_config()
        names = HeadNames.of(config.model_type, files.num_layers)
        if names is None:
            raise ConfigError(
                f"target {files.name}: strategy mtp fine-tunes the MTP layer of a target of type "
                f"{', '.join((*QWEN_KINDS, *DEEPSEEK_KINDS))}, found {config.model_type}. Choose another strategy"
            )
        return cls(files, config, names)

    def list_stored(self) -> list[str]:
        """Return the names of the layer's tensors in the target's files, sorted."""
        return sorted(self.names.select(WeightFiles(self.files)))

    def require_complete(self, expected: set[str]) -> None:
        """Raise ConfigError unless the files have exactly the tensors `expected`, the draft's names. Reads headers only."""
        stored = self.list_stored()
        empty = {self.names.to_ours(name): torch.empty(2, 1, device="meta") for name in stored}
        try:
            found = set(stack_experts(empty))
        except ValueError as error:
            raise ConfigError(f"target {self.files.name}: MTP layer in {self.files.model}: {error}") from error
        if found == expected:
            return
        missing = sorted(self.names.to_theirs(name) for name in expected - found)
        unknown = sorted(self.names.to_theirs(name) for name in found - expected)
        why = "it was published without one" if not stored else "the files are not complete, or are quantised"
        raise ConfigError(
            f"target {self.files.name}: strategy mtp fine-tunes the target's MTP layer, expected under "
            f"{self.names.root}* in {self.files.model}: missing {list_names(missing, 3)}; unknown {list_names(unknown, 3)}: {why}. "
            "Take a checkpoint with this layer in bfloat16, or another strategy"
        )

    def read(self) -> dict[str, Tensor]:
        """Return the layer's tensors by the draft's names, in fp32.

        Raises:
            StoreError: a file is missing or damaged.
        """
        files = WeightFiles(self.files)
        # One by one, so that a layer in bfloat16 is not held twice.
        return stack_experts(
            {self.names.to_ours(name): files.open_tensor(name)[:].float() for name in self.list_stored()}
        )


def read_whole_config(files: TargetFiles) -> dict[str, Any]:
    """Return a target's config.json as it is. Raises StoreError if it cannot be read."""
    path = ModelFiles(files).require_file("config.json")
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: the config of target {files.name} cannot be read: {error}") from error
