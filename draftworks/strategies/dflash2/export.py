"""Export formats of DFlash 2: those of DFlash, with the tensors of convolutions and selector and their sizes in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import is_speculators, require
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import (
    BACKBONE,
    DFlashFormat,
    SpeculatorsDFlash,
    ZlabDFlash,
    add_options,
    drop_head_keys,
    read_head_settings,
)

CLASS_NAME = "DFlash2DraftModel"
"""Of z-lab, SGLang, vLLM, SpecForge and speculators."""
_CLASS_NAMES = (CLASS_NAME, "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
"""SGLang 0.5.23 takes the others for the same."""
CONVOLUTION_SIZES = ("conv_kernel_size", "conv_group_size")
SIZES = (*CONVOLUTION_SIZES, "selector_rank", "selector_top_k")
"""Keys of all layouts, called as our options are."""
_SPECULATORS_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


class DFlash2Parts(DFlashFormat):
    """Mixin that adds convolutions and selector to a format of DFlash, which follows it among the bases. Exported names have
    no prefix for the backbone."""

    strategy = "dflash2"
    head_keys = dict(zip(SIZES, SIZES))
    prefixes = BACKBONE
    model_class = CLASS_NAME

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        taps, group, rank = (shape.options[size] for size in SIZES[:3])
        hidden, codebook = shape.hidden_size, (shape.vocab_size, rank)
        return {
            **list_convolution_tensors(shape.num_layers, hidden, taps, group),
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        }


def describe_vllm_block(draft: CanonicalDraft) -> str:
    """Return what one has to tell vLLM: 0.32 and 0.33 take 1 + num_speculative_tokens as the block."""
    tokens = draft.config["block_size"] - 1
    return (
        f"vLLM takes 1 + num_speculative_tokens as the convolutions' block: ask for {tokens}. It serves such a draft on a GPU; on a "
        "CPU its model computes our tokens, and its runner refuses it."
    )


def list_convolution_tensors(layers: int, hidden: int, taps: int, group: int) -> Shapes:
    """Return the exported names of the convolutions of all layers, with their shapes."""
    names: Shapes = {}
    for convolution in (f"layers.{i}.{part}_conv" for i in range(layers) for part in ("attention", "mlp")):
        names[f"{convolution}.base_kernel"] = (2, taps, hidden)
        names[f"{convolution}.kernel_projection.weight"] = (2 * taps * (hidden // group), hidden)
    return names


def read_sizes(settings: Mapping[str, Any], hidden: int, where: str, names: tuple[str, ...] = SIZES) -> dict[str, int]:
    """Return the options `names` of convolutions and selector from the keys of a config.json.

    Raises:
        ConfigError: a key is missing or no positive integer, or the groups do not divide the hidden size.
    """
    sizes = {size: require(settings, size, where) for size in names}
    for size, found in sizes.items():
        if not isinstance(found, int) or found < 1:
            raise ConfigError(f"{where}: {size}: expected an integer from 1, found {found!r}")
    if hidden % sizes["conv_group_size"]:
        raise ConfigError(f"{where}: conv_group_size {sizes['conv_group_size']} does not divide hidden_size {hidden}")
    return sizes


class ZlabDFlash2(DFlash2Parts, ZlabDFlash):
    name = "zlab_dflash2"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "SGLang with DFlash 2 (`--speculative-algorithm DFLASH`), as 0.5.23; vLLM from 0.32 on; z-lab's own code; and SpecForge "
            f"from #772. {describe_vllm_block(draft)}"
        )

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. The block size is also written in `dflash_config`, where z-lab's own drafts of this class have it."""
        config = super().build_config(draft, dtype)
        return {**config, "dflash_config": {**config["dflash_config"], "block_size": config["block_size"]}}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return any(name in (config.get("architectures") or []) for name in _CLASS_NAMES) and not is_speculators(config)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json: dflash_config"
        backbone = super().read_shape(drop_head_keys(config, SIZES), target)
        settings = read_head_settings(config, (*SIZES, "block_size"), where)
        return add_options(backbone, read_sizes(settings, backbone.hidden_size, where))


class SpeculatorsDFlash2(DFlash2Parts, SpeculatorsDFlash):
    name = "speculators_dflash2"
    both_ways = True

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "speculators 0.9.0, and vLLM from 0.32 on. Not SGLang 0.5.23, which looks for the sizes in `dflash_config`, as "
            f"zlab_dflash2 has them. {describe_vllm_block(draft)}"
        )

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        backbone = super().read_shape(config, target)
        settings = {**_SPECULATORS_DEFAULTS, **config}
        return add_options(backbone, read_sizes(settings, backbone.hidden_size, "config.json"))
