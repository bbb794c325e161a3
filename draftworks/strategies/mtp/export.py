"""Export formats of an MTP layer: under the target's own names, and that of speculators.

Under the target's own names the folder has the target's config.json and the layer's tensors alone, as published layers of
DeepSeek-V3 have: SGLang takes it as a draft's path and lends it the embedding and the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import (
    build_dtype_keys,
    build_speculators_keys,
    build_vllm_command,
    build_vllm_commands,
    is_speculators,
    locate_model,
    read_proposed_tokens,
    require,
)
from draftworks.export.conventions import PROVENANCE, name_releases
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes
from draftworks.strategies.mtp.target_head import HeadNames, TargetHead, build_modules, read_whole_config, split_experts

_LAYERS = "transformer_layer_config"
_QUANTIZATION = "quantization_config"
"""Left out of what is written: exported tensors are not quantised."""
_SPECULATORS = HeadNames(
    "mtp_layers.0.",
    {
        "mtp_layers.0.input_proj.": "fc.",
        "mtp_layers.0.hidden_layernorm.": "hidden_norm.",
        "mtp_layers.0.token_layernorm.": "token_norm.",
        "mtp_layers.0.final_layernorm.": "norm.",
        "mtp_layers.0.": "layer.",
    },
)


class MtpFormat(ExportFormat):
    """Base of the formats of MTP layers."""

    strategy = "mtp"


class TargetMtp(MtpFormat):
    """The target's own names. Such a folder is not imported: its config.json is that of any target."""

    name = "target_mtp"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return False

    def to_canonical_name(self, name: str) -> str:
        return name

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "SGLang 0.5.23 (by its sources) and vLLM from 0.32 on, as the draft of this target; or any server, put in place of the "
            "target's layer."
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        steps = draft.config["options"]["num_steps"]
        return {
            "SGLang": f"python -m sglang.launch_server --model-path {locate_model(draft.target)} "
            f"--speculative-algorithm NEXTN --speculative-draft-model-path {folder} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}",
            **build_vllm_command(draft, folder, "mtp", steps),
        }

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        head = TargetHead.find(draft.target)
        return _describe(head.config, {"experts_one_by_one": _are_one_by_one(head)})

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        head = TargetHead.find(draft.target)
        tensors = split_experts(draft.weights) if _are_one_by_one(head) else draft.weights
        return {head.names.to_theirs(name): tensor for name, tensor in tensors.items()}

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """Return the target's config.json, in the dtype of the export and without quantisation."""
        found = {**read_whole_config(draft.target), **build_dtype_keys(dtype)}
        return {key: value for key, value in found.items() if key != _QUANTIZATION}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        return _describe(_parse(config), {"experts_one_by_one": _are_one_by_one(TargetHead.find(target))})

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        tensors = _list_tensors(shape)
        names = HeadNames.of(shape.options["config"]["model_type"], shape.options["config"]["num_hidden_layers"])
        assert names is not None, "only targets with a layer of known names have such a draft"
        split = split_experts(tensors) if shape.options["experts_one_by_one"] else tensors
        return {names.to_theirs(name): tuple(tensor.shape) for name, tensor in split.items()}


class SpeculatorsMtp(MtpFormat):
    """speculators' `MTPDraftModel`: experts stacked, the layer's settings under `transformer_layer_config`."""

    name = "speculators_mtp"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return f"speculators 0.9.0. Not vLLM: {name_releases()} refuse speculators' files of MTP; they take target_mtp."

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return build_vllm_commands(draft, folder, "mtp", draft.config["options"]["num_steps"])

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        steps = draft.config["options"]["num_steps"]
        return _describe(TargetHead.find(draft.target).config, {"num_steps": steps})

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {_SPECULATORS.to_theirs(name): tensor for name, tensor in draft.weights.items()}

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        whole = read_whole_config(draft.target)
        layers = {key: value for key, value in whole.get("text_config", whole).items() if key != _QUANTIZATION}
        return {
            "architectures": ["MTPDraftModel"],
            **build_speculators_keys("mtp", draft.target, draft.config["options"]["num_steps"]),
            "num_nextn_predict_layers": 1,
            _LAYERS: layers | build_dtype_keys(dtype),
            **build_dtype_keys(dtype),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return is_speculators(config) and config["speculators_model_type"] == "mtp"

    def to_canonical_name(self, name: str) -> str:
        return _SPECULATORS.to_ours(name)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        layers = _parse(require(config, _LAYERS, "config.json"))
        if _list_sizes(layers) != _list_sizes(TargetHead.find(target).config):
            raise ConfigError(f"config.json: {_LAYERS}: a layer of other sizes than that of target {target.name}")
        return _describe(layers, {"num_steps": read_proposed_tokens(config, "config.json")})

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        return {_SPECULATORS.to_theirs(name): tuple(tensor.shape) for name, tensor in _list_tensors(shape).items()}


def _describe(config: Any, options: Mapping[str, Any]) -> DraftShape:
    """Return the shape of the layer of a target with this text config, all of whose settings are among the options."""
    return DraftShape(
        strategy="mtp",
        taps=(),
        hidden_size=config.hidden_size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        num_layers=1,
        vocab_size=config.vocab_size,
        draft_vocab_size=None,
        rms_norm_eps=config.rms_norm_eps,
        rope=dict(config.rope_parameters),
        options={**options, "config": _list_settings(config)},
    )


def _list_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a text config that are not of the files that it was read from."""
    left_out = ("dtype", "transformers_version", "architectures", "_name_or_path", _QUANTIZATION, PROVENANCE)
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def _parse(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**config).get_text_config()


def _list_tensors(shape: DraftShape) -> dict[str, Tensor]:
    """Return tensors on device meta by the draft's names."""
    return build_modules(_parse(shape.options["config"])).list_tensors()


def _list_sizes(config: Any) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in build_modules(config).list_tensors().items()}


def _are_one_by_one(head: TargetHead) -> bool:
    """Whether the target's files have the experts one by one, as servers of that target expect them."""
    return any(".experts.0." in name for name in head.list_stored())
