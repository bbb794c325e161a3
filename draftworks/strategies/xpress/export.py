"""Export formats of XPress: speculators' and z-lab's layouts of DFlash, with the refiner and its keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import build_vllm_command
from draftworks.export.conventions import name_releases
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import BACKBONE, SpeculatorsDFlash, ZlabDFlash, add_options

_KEYS = {"refiner_rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio", "jacobi_passes": "num_jacobi_passes"}
"""What speculators calls our options."""
_DEFAULTS = {"xpress_rank": 256, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
"""Of speculators 0.9.0, for keys that a config.json leaves out."""
_REFINER, _OF_VLLM = "refiner_head.", "xpress_head."
_VLLM_NAMES = {
    "token_embed.": "w1.",
    "mix_l": "mix.L",
    "mlp_gate.": "mlp.gate_proj.",
    "mlp_up.": "mlp.up_proj.",
    "mlp_down.": "mlp.down_proj.",
    "readout.": "w2.",
}
"""What vLLM calls the refiner's tensors, by what ours and speculators' begin with."""
_VLLM_CLASSES = ("Qwen3XPressModel", "DFlashQwen3XPressModel")


def _list_refiner_tensors(shape: DraftShape) -> Shapes:
    options, hidden, vocab = shape.options, shape.hidden_size, shape.vocab_size
    rank, block = options["refiner_rank"], options["block_size"]
    wide = rank * options["mlp_ratio"]
    return {
        "token_embed.weight": (vocab, rank),
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "in_proj.weight": (rank, 3 * rank),
        "mix_l": (rank, block, block),
        "mlp_gate.weight": (wide, rank),
        "mlp_up.weight": (wide, rank),
        "mlp_down.weight": (rank, wide),
        "readout.weight": (vocab, rank),
    }


class SpeculatorsXPress(SpeculatorsDFlash):
    """The backbone as in DFlash's format. Exported names have no prefix for it, and `refiner_head.` for the refiner."""

    name = "speculators_xpress"
    strategy = "xpress"
    head_keys = _KEYS
    prefixes = BACKBONE
    model_class = "XPressSpeculator"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return f"speculators 0.9.0. Not vLLM: {name_releases()} refuse speculators' files of XPress; 0.33 reads vllm_xpress."

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        return {f"{_REFINER}{name}": size for name, size in _list_refiner_tensors(shape).items()}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        backbone = super().read_shape(config, target)
        options = {option: config.get(key, _DEFAULTS[key]) for option, key in _KEYS.items()}
        for option, value in options.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json: {_KEYS[option]}: expected an integer from 1, found {value!r}")
        return add_options(backbone, options)


class VllmXPress(ZlabDFlash):
    """vLLM 0.33's own form, as its model_executor/models/qwen3_xpress.py loads it.

    The mixer is stored as it is trained: vLLM makes it causal and adds the identity itself. It scores the tokens of a pass among
    the `xpress_topc` best of the backbone, 512 by default; 0 is all of them, as drafts here compute.
    """

    name = "vllm_xpress"
    strategy = "xpress"
    prefixes = BACKBONE
    model_class = _VLLM_CLASSES[0]

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return "vLLM from 0.33 on (#54448), on GPUs. 0.32 and SGLang 0.5.23 have no XPress."

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        [command] = build_vllm_command(draft, folder, "dflash", self.count_tokens(draft)).values()
        return {"vLLM from 0.33 on": command}

    def list_head_options(self, draft: CanonicalDraft) -> dict[str, Any]:
        return {option: getattr(draft.options, option) for option in _KEYS}

    def build_head_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        return {}

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. The refiner's keys are at the top level."""
        options = self.list_head_options(draft)
        return {
            **super().build_config(draft, dtype),
            "xpress_block_size": draft.config["block_size"],
            "xpress_rank": options["refiner_rank"],
            "xpress_mlp_hidden": options["refiner_rank"] * options["mlp_ratio"],
            "xpress_num_passes": options["jacobi_passes"],
            "xpress_topc": 0,
        }

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {_to_vllm_name(name): tensor for name, tensor in super().build_tensors(draft).items()}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return any(name in _VLLM_CLASSES for name in config.get("architectures") or [])

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        backbone = super().read_shape(config, target)
        block, rank = backbone.options["block_size"], config.get("xpress_rank", 256)
        found = {"xpress_block_size": config.get("xpress_block_size", block), "xpress_rank": rank}
        found |= {"xpress_mlp_hidden": config.get("xpress_mlp_hidden", 512)}
        found |= {"xpress_num_passes": config.get("xpress_num_passes", _DEFAULTS["num_jacobi_passes"])}
        for key, value in found.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{where}: {key}: expected an integer from 1, found {value!r}")
        if found["xpress_block_size"] != block or found["xpress_mlp_hidden"] % rank or config.get("sample_from_anchor"):
            raise ConfigError(
                f"{where}: expected an xpress_block_size of the backbone's {block}, an xpress_mlp_hidden that is a multiple of "
                f"xpress_rank {rank}, and no sample_from_anchor, found {found}, {config.get('sample_from_anchor')}"
            )
        ratio = found["xpress_mlp_hidden"] // rank
        head = {"refiner_rank": rank, "mlp_ratio": ratio, "jacobi_passes": found["xpress_num_passes"]}
        return add_options(backbone, head)

    def list_remarks(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        best = config.get("xpress_topc", 512)
        if best == 0:
            return []
        return [
            f"xpress_topc {best}: vLLM looks for tokens among so many of the backbone's best; drafts here do in all"
        ]

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        return {_to_vllm_name(f"{_REFINER}{name}"): size for name, size in _list_refiner_tensors(shape).items()}

    def to_canonical_name(self, name: str) -> str:
        if not name.startswith(_OF_VLLM):
            return super().to_canonical_name(name)
        rest = name.removeprefix(_OF_VLLM)
        for ours, theirs in _VLLM_NAMES.items():
            if rest.startswith(theirs):
                return f"{_REFINER}{ours}{rest.removeprefix(theirs)}"
        return f"{_REFINER}{rest}"


def _to_vllm_name(name: str) -> str:
    """Return vLLM's name of a tensor of the refiner by ours; other names stay."""
    if not name.startswith(_REFINER):
        return name
    rest = name.removeprefix(_REFINER)
    for ours, theirs in _VLLM_NAMES.items():
        if rest.startswith(ours):
            return f"{_OF_VLLM}{theirs}{rest.removeprefix(ours)}"
    return f"{_OF_VLLM}{rest}"
