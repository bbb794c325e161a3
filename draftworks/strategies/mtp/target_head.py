"""The target's own multi-token-prediction (MTP) layer: its module from transformers, its tensors in the files and the draft.

Qwen3-Next and Qwen3.5 keep them under `mtp.`, DeepSeek-V3 as one more decoder layer after its own. The order of the two
inputs of the projection is the same in both: the token's embedding, then the hidden state. (Read in SGLang 0.5.23,
`qwen3_next_mtp.py`, `qwen3_5_mtp.py` and `deepseek_nextn.py`, and in speculators 0.9.0, `convert/mtp/converter.py`.)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import WeightFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import read_json
from draftworks.storage.words import list_names
from draftworks.targets.safetensors_headers import ModelFiles
from draftworks.targets.weights import read_model_config

_QWEN = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.pre_fc_norm_embedding.": "token_norm.",
    "mtp.layers.0.": "layer.",
    "mtp.norm.": "norm.",
}
_DEEPSEEK = {
    "eh_proj.": "fc.",
    "hnorm.": "hidden_norm.",
    "enorm.": "token_norm.",
    "shared_head.norm.": "norm.",
    "": "layer.",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""DeepSeek's files repeat the embedding and the head of the model in the layer; servers use the model's."""
QWEN_KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DEEPSEEK_KINDS = ("deepseek_v3",)
_EXPERT = re.compile(r"^(?P<owner>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


@dataclass(frozen=True)
class HeadNames:
    """Prefixes of names in the target's files, the more special first, and the draft's for them.

    Attributes:
        root: what all names in the files begin with.
    """

    root: str
    prefixes: Mapping[str, str]

    @classmethod
    def of(cls, model_type: str, num_layers: int) -> HeadNames | None:
        """Return the names for a model type (that of the text config); None if it is not known to have such a layer."""
        if model_type in QWEN_KINDS:
            return cls("mtp.", _QWEN)
        if model_type in DEEPSEEK_KINDS:
            root = f"model.layers.{num_layers}."
            return cls(root, {f"{root}{theirs}": ours for theirs, ours in _DEEPSEEK.items()})
        return None

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of a target's tensors that are the head's, but not copies of the model's."""
        copies = {f"{self.root}{name}" for name in _COPIES}
        return [name for name in names if name.startswith(self.root) and name not in copies]

    def to_ours(self, name: str) -> str:
        """Return the draft's name of a tensor of the files; an unknown name is returned unchanged."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def to_theirs(self, name: str) -> str:
        """Return the name in the files of one of the draft's tensors."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with experts that are stored one by one as `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I).

    Raises:
        ValueError: a number or a part of an expert is missing.
    """
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.match(name):
            experts.setdefault(found["owner"], {}).setdefault(int(found["number"]), {})[found["part"]] = tensor
        else:
            stacked[name] = tensor
    for owner, numbered in experts.items():
        if set(numbered) != set(range(len(numbered))) or any(len(parts) != 3 for parts in numbered.values()):
            raise ValueError(f"{owner}: experts 0 to {max(numbered)} are not all complete")
        each = [numbered[number] for number in range(len(numbered))]
        stacked[f"{owner}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        stacked[f"{owner}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return stacked


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with stacked experts one by one: the inverse of `stack_experts`."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        if not owner.endswith(".experts"):
            split[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = expert.chunk(2)
                split[f"{owner}.{number}.gate_proj.weight"] = gate
                split[f"{owner}.{number}.up_proj.weight"] = up
            else:
                split[f"{owner}.{number}.down_proj.weight"] = expert
    return split


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
