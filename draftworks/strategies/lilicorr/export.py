"""Export format of LiLiCorr: z-lab's layout of DFlash with the reranker, as SGLang reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import require
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import BACKBONE, ZlabDFlash, add_options, drop_head_keys, read_head_settings
from draftworks.strategies.dflash2.export import CONVOLUTION_SIZES, list_convolution_tensors, read_sizes
from draftworks.strategies.lilicorr.options import default_lattice_size

CLASS_NAME = "LiLiCorrDraftModel"
_HEAD = "lilicorr."
_KEYS = {
    "candidate_topk": "candidate_topk",
    "lattice_size": "hidden_size",
    "lattice_layers": "num_layers",
    "lattice_heads": "num_heads",
    "lattice_mlp_ratio": "mlp_ratio",
    "factor_dim": "factor_dim",
    "logit_scale": "logit_scale",
    "vector_eps": "vector_eps",
}
"""What our options are called behind `lilicorr_`."""
_MODELOPT_NAMES = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
"""Parts of tensor names as Model-Optimizer #2342 trains them, which SGLang 0.5.23 calls otherwise."""


class SglangLiLiCorr(ZlabDFlash):
    """The backbone as in DFlash's formats. Its exported names have no prefix; those of the reranker have ours."""

    name = "sglang_lilicorr"
    strategy = "lilicorr"
    head_keys = {option: f"lilicorr_{key}" for option, key in _KEYS.items()}
    prefixes = BACKBONE
    model_class = CLASS_NAME

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        tokens = draft.config["block_size"] - 1
        return (
            "SGLang 0.5.23 with DFlash (`--speculative-algorithm DFLASH`), which knows the reranker by `architectures`. It draws "
            "proposals from the scores only where SGLANG_ENABLE_LILICORR_SAMPLING is set, else it takes the best. vLLM 0.32 and 0.33 "
            f"serve this form on GPUs: `method` is `dflash`, {tokens} tokens. On a CPU its model computes our tokens."
        )

    def list_head_options(self, draft: CanonicalDraft) -> dict[str, Any]:
        options = super().list_head_options(draft)
        sizes = {size: getattr(draft.options, size) for size in CONVOLUTION_SIZES}
        convolutions = {} if draft.options.conv_kernel_size is None else sizes
        return _leave_out_default_widths(options, draft.config["hidden_size"]) | convolutions

    def build_head_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        options = self.list_head_options(draft)
        options |= _resolve_widths(options, draft.config["hidden_size"])
        names = {**self.head_keys, **dict(zip(CONVOLUTION_SIZES, CONVOLUTION_SIZES))}
        keys = {names[option]: value for option, value in options.items()}
        return {"projector_type": "lilicorr", "lilicorr_enabled": True, **keys}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return CLASS_NAME in (config.get("architectures") or [])

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json: dflash_config"
        keys = self.head_keys.values()
        settings = read_head_settings(config, [*keys, *CONVOLUTION_SIZES], where)
        dropped = [*keys, "lilicorr_enabled", "projector_type", *CONVOLUTION_SIZES]
        backbone = super().read_shape(drop_head_keys(config, dropped), target)
        options = {option: require(settings, key, where) for option, key in self.head_keys.items()}
        # 0 is how a reranker as wide as the target is written.
        options["lattice_size"] = options["lattice_size"] or backbone.hidden_size
        options = _leave_out_default_widths(options, backbone.hidden_size)
        if any(settings.get(size) for size in CONVOLUTION_SIZES):
            options |= read_sizes(settings, backbone.hidden_size, where, CONVOLUTION_SIZES)
        return add_options(backbone, options)

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        names = {f"{_HEAD}{name}": size for name, size in _list_lattice_tensors(shape).items()}
        if shape.options.get("conv_kernel_size") is not None:
            taps, group = (shape.options[size] for size in CONVOLUTION_SIZES)
            names |= list_convolution_tensors(shape.num_layers, shape.hidden_size, taps, group)
        return names

    def to_canonical_name(self, name: str) -> str:
        name = super().to_canonical_name(name)
        if not name.startswith(_HEAD):
            return name
        for other, ours in _MODELOPT_NAMES.items():
            name = name.replace(other, ours)
        return name


def _resolve_widths(options: Mapping[str, Any], hidden_size: int) -> dict[str, int]:
    size = options["lattice_size"] or default_lattice_size(hidden_size)
    return {"lattice_size": size, "factor_dim": options["factor_dim"] or size}


def _leave_out_default_widths(options: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the options with None for widths that are the defaults, as options have them."""
    widths = _resolve_widths(options, hidden_size)
    defaults = {"lattice_size": default_lattice_size(hidden_size), "factor_dim": widths["lattice_size"]}
    return {**options, **{name: None if width == defaults[name] else width for name, width in widths.items()}}


def _list_lattice_tensors(shape: DraftShape) -> Shapes:
    options = {**shape.options, **_resolve_widths(shape.options, shape.hidden_size)}
    hidden = shape.hidden_size
    size, heads, factors = options["lattice_size"], options["lattice_heads"], options["factor_dim"]
    places, wide = options["block_size"] - 1, int(size * options["lattice_mlp_ratio"])
    names: Shapes = {
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "slot_embedding": (1, 1, places, 1, size),
        "rank_embedding": (1, 1, 1, options["candidate_topk"], size),
        "relative_slot_bias": (heads, 2 * places + 1),
        "same_slot_bias": (heads,),
        "output_norm.weight": (size,),
        "anchor_norm.weight": (size,),
        **_list_affine("pass_hidden_proj", hidden, size),
        **_list_affine("context_proj", hidden, size),
        **_list_affine("feature_mlp.up_proj", 5, size),
        **_list_affine("feature_mlp.down_proj", size, size),
        **_list_affine("factor_input_proj", 3 * size, size),
    }
    if size != hidden:
        names |= _list_affine("token_proj", hidden, size)
    for head in ("out_head", "in_head", "anchor_out_head"):
        names |= _list_affine(head, size, factors)
    for layer in range(options["lattice_layers"]):
        prefix = f"layers.{layer}."
        names |= {
            f"{prefix}attn_norm.weight": (size,),
            f"{prefix}mlp_norm.weight": (size,),
            f"{prefix}attn.in_proj_weight": (3 * size, size),
            f"{prefix}attn.in_proj_bias": (3 * size,),
            **_list_affine(f"{prefix}attn.out_proj", size, size),
            **_list_affine(f"{prefix}mlp.up_proj", size, wide),
            **_list_affine(f"{prefix}mlp.down_proj", wide, size),
        }
    return names


def _list_affine(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
