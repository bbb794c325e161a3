"""Export formats of DFlash: that of z-lab and SGLang, and that of speculators and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import (
    build_layer_keys,
    build_speculators_keys,
    build_vllm_command,
    build_vllm_commands,
    is_speculators,
    list_layer_tensors,
    locate_model,
    read_layer_sizes,
    require,
)
from draftworks.export.conventions import from_format, to_format
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes

FULL, SLIDING = "full_attention", "sliding_attention"
_SAME_NAMES = (
    *("hidden_size", "head_dim", "num_heads", "num_kv_heads", "intermediate_size", "num_layers"),
    *("vocab_size", "rms_norm_eps"),
)
"""Fields of a `DraftShape` that our own config has under the same names."""
_DSPARK_CLASSES = ("DSparkDraftModel", "Qwen3DSparkModel")
"""Of SpecForge and of DeepSpec; SGLang loads both."""
_OF_OTHER_STRATEGIES = (
    *("projector_type", "markov_rank", "prefix_gru", "emb_dim"),
    *("conv_kernel_size", "selector_rank"),
)
_PLAIN = {
    "use_swa": False,
    "use_gemma_norm": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
    "attention_value_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
"""Keys that change what servers compute with the same tensors, each with the value that changes nothing."""


BACKBONE: Mapping[str, tuple[str, ...]] = {"backbone.": ("fc", "hidden_norm", "layers", "norm")}


class DFlashFormat(ExportFormat):
    """Base of the formats of the family: the tensors of the backbone, without the target's embedding and head, and of a head.

    Attributes:
        head_keys: what a config.json calls the options of a head, by these.
        prefixes: of canonical names, that exported names do not have; each with the first parts of the names behind it.
        model_class: `architectures` of a config.json.
    """

    strategy = "dflash"
    head_keys: ClassVar[Mapping[str, str]] = {}
    prefixes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    model_class: ClassVar[str]

    def count_tokens(self, draft: CanonicalDraft) -> int:
        """Return how many tokens servers ask for."""
        return draft.config["block_size"] - 1

    def list_head_options(self, draft: CanonicalDraft) -> dict[str, Any]:
        """Return the options of the head of one of our drafts that decide what it computes."""
        return {option: getattr(draft.options, option) for option in self.head_keys}

    def build_head_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        """Return the keys of config.json for the head of one of our drafts."""
        return {self.head_keys[option]: value for option, value in self.list_head_options(draft).items()}

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        """Return the exported names and shapes of what comes to the backbone."""
        return {}

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        config = draft.config
        return DraftShape(
            strategy=self.strategy,
            taps=draft.taps,
            draft_vocab_size=None,
            rope=dict(config["rope_parameters"]),
            options=build_block_options(
                config["block_size"],
                config["mask_token_id"],
                list(draft.options.layer_windows()),
                draft.options.sliding_window_kind,
            )
            | self.list_head_options(draft),
            **{name: config[name] for name in _SAME_NAMES},
        )

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        tensors = dict(draft.weights)
        for prefix in self.prefixes:
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return tensors

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        hidden = shape.hidden_size
        names: Shapes = {
            "fc.weight": (hidden, len(shape.taps) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(shape.num_layers):
            per_head = {f"layers.{layer}.self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
            names |= list_layer_tensors(f"layers.{layer}.", shape, inputs=hidden) | per_head
        return names | self.list_head_tensors(shape)

    def to_canonical_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        first = name.split(".", 1)[0]
        return "".join(prefix for prefix, parts in self.prefixes.items() if first in parts) + name


def build_block_options(
    block_size: int, mask_token_id: int, windows: list[int | None], window_kind: str
) -> dict[str, Any]:
    """Return the options of the strategy that decide what a block computes.

    Raises:
        ConfigError: windows of several sizes.
    """
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(f"sliding windows of {sorted(sizes)} tokens: expected one size in all layers that have one")
    sliding = [layer for layer, window in enumerate(windows) if window is not None]
    return {
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "sliding_window": sizes.pop() if sizes else None,
        "sliding_layers": None if len(sliding) in (0, len(windows)) else sliding,
        "sliding_window_kind": window_kind if sliding else "token",
    }


def add_options(shape: DraftShape, head: Mapping[str, Any]) -> DraftShape:
    """Return the shape of a backbone with the options of a head."""
    return replace(shape, options={**shape.options, **head})


def build_layer_type_keys(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return Qwen3's keys for the sliding windows of layers, all explicit: their defaults differ by version."""
    sliding = [window for window in windows if window is not None]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "use_sliding_window": bool(sliding),
        "sliding_window": sliding[0] if sliding else None,
        "max_window_layers": len(windows),
    }


def read_windows(config: Mapping[str, Any], num_layers: int, where: str) -> list[int | None]:
    """Return the sliding window of every layer, None for full attention.

    Raises:
        ConfigError: not a type for each layer, an unknown one, or no size.
    """
    types = config.get("layer_types") or [FULL] * num_layers
    window = config.get("sliding_window")
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise ConfigError(f"{where}: layer_types: expected {FULL} or {SLIDING} for {num_layers} layers, found {types}")
    if SLIDING in types and not window:
        raise ConfigError(f"{where}: layer_types names {SLIDING} layers, but there is no sliding_window")
    return [window if kind == SLIDING else None for kind in types]


_BOTH_WAYS = {
    "anchor": {"sliding_window_non_causal": False},
    "anchor_both_ways": {"sliding_window_non_causal": True},
}


def is_domino(config: Mapping[str, Any]) -> bool:
    """Return whether a config of DFlash's layout is of a Domino draft, by its projector or SpecForge's class name."""
    return _find_anywhere(config, "projector_type") == "domino" or _is_of_class(config, "DominoDraftModel")


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Return whether a config of DFlash's layout is of a DSpark draft; some trainers keep DFlash's class name for it."""
    kind = _find_anywhere(config, "projector_type")
    marked = kind == "dspark" or (kind is None and _find_anywhere(config, "markov_rank") is not None)
    return not is_domino(config) and (marked or _is_of_class(config, *_DSPARK_CLASSES))


def read_head_settings(config: Mapping[str, Any], keys: Iterable[str], where: str) -> dict[str, Any]:
    """Return the values of those `keys` that have one in `dflash_config` or beside it; trainers write either or both.

    Raises:
        ConfigError: both, and not the same.
    """
    inside = config.get("dflash_config") or {}
    found: dict[str, Any] = {}
    for key in keys:
        within, beside = inside.get(key), config.get(key)
        if within is not None and beside is not None and within != beside:
            raise ConfigError(f"{where}: {key} {within}, but {beside} beside dflash_config")
        if within is not None or beside is not None:
            found[key] = beside if within is None else within
    return found


def drop_head_keys(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the config of the backbone alone: without `keys`, and always with a `dflash_config`."""
    dropped = set(keys)
    outer = {key: value for key, value in config.items() if key not in dropped}
    inner = {key: value for key, value in (config.get("dflash_config") or {}).items() if key not in dropped}
    return {**outer, "dflash_config": inner}


def refuse_other_strategies(config: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a draft that has DFlash's class name but is of a strategy built on DFlash."""
    dflash = config.get("dflash_config") or {}
    found = [key for key in _OF_OTHER_STRATEGIES if config.get(key, dflash.get(key))]
    if found:
        raise ConfigError(f"{where}: {', '.join(found)}: a draft of another strategy that is built on DFlash")


def refuse_other_arithmetic(config: Mapping[str, Any], windows: list[int | None], where: str) -> None:
    """Raise ConfigError for a draft that computes something else with DFlash's tensors."""
    for key, plain in _PLAIN.items():
        found = _find_anywhere(config, key)
        if found is not None and found != plain:
            raise ConfigError(f"{where}: {key} {found}: drafts here compute with {plain} only")
    for key in ("is_causal", "causal"):
        causal = _find_anywhere(config, key)
        if causal is not None and any(bool(causal) != (window is not None) for window in windows):
            raise ConfigError(
                f"{where}: {key} {causal}: in drafts here the tokens of a block see those before them in layers with a "
                "sliding window, and all of the block in the others"
            )


def refuse_part_of_vocabulary(config: Mapping[str, Any], vocab_size: int, strategy: str, where: str) -> None:
    """Raise ConfigError for a draft with a reduced vocabulary."""
    found = config.get("draft_vocab_size")
    if found is not None and found != vocab_size:
        raise ConfigError(
            f"{where}: draft_vocab_size {found} of {vocab_size}: {strategy} drafts here predict all of the target's tokens"
        )


def _find_anywhere(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in `dflash_config`, else beside it."""
    within = (config.get("dflash_config") or {}).get(key)
    return config.get(key) if within is None else within


def _is_of_class(config: Mapping[str, Any], *classes: str) -> bool:
    return any(name in classes for name in config.get("architectures") or [])


class SpeculatorsDFlash(DFlashFormat):
    """The layout of speculators 0.9.0.

    Attributes:
        both_ways: the library's default of `sliding_window_non_causal` for the strategy.
    """

    name = "speculators_dflash"
    model_class = "DFlashSpeculator"
    both_ways = False

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        if draft.options.sliding_window is not None:
            return (
                "speculators 0.9.0; and vLLM with DFlash, which counts the window from each token of a block: its last one sees up "
                "to block_size - 1 positions fewer there."
            )
        return "speculators 0.9.0, and vLLM with DFlash."

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return build_vllm_commands(draft, folder, self.strategy, self.count_tokens(draft))

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. `sliding_window_non_causal` is left out at the library's default: with false vLLM makes full attention
        causal."""
        config, kind = draft.config, draft.options.sliding_window_kind
        both_ways = {} if kind == "token" or (kind == "anchor_both_ways") == self.both_ways else _BOTH_WAYS[kind]
        layer = {
            "model_type": "qwen3",
            "num_hidden_layers": config["num_layers"],
            **build_layer_keys(draft, dtype),
            **build_layer_type_keys(draft.options.layer_windows()),
        }
        return {
            "architectures": [self.model_class],
            **build_speculators_keys(self.strategy, draft.target, self.count_tokens(draft)),
            "transformer_layer_config": layer,
            "draft_vocab_size": config["vocab_size"],
            "block_size": config["block_size"],
            "aux_hidden_state_layer_ids": to_format(self.name, draft.taps),
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": False,
            **both_ways,
            "tie_word_embeddings": False,
            "dtype": layer["dtype"],
            "torch_dtype": layer["dtype"],
            **self.build_head_keys(draft),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == self.strategy

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        layer = require(config, "transformer_layer_config", where)
        sizes = read_layer_sizes(layer, f"{where}: transformer_layer_config")
        windows = read_windows(layer, sizes["num_layers"], f"{where}: transformer_layer_config")
        if any(windows) and not layer.get("use_sliding_window"):
            raise ConfigError(
                f"{where}: transformer_layer_config: {SLIDING} layers without use_sliding_window: the library would forget the window"
            )
        kind = "anchor_both_ways" if config.get("sliding_window_non_causal", self.both_ways) else "anchor"
        if config.get("sample_from_anchor"):
            raise ConfigError(f"{where}: sample_from_anchor: true: drafts here take the anchor for a known token")
        refuse_part_of_vocabulary(config, sizes["vocab_size"], self.strategy, where)
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(config, "aux_hidden_state_layer_ids", where)),
            draft_vocab_size=None,
            options=build_block_options(
                require(config, "block_size", where), require(config, "mask_token_id", where), windows, kind
            ),
            **sizes,
        )


class ZlabDFlash(DFlashFormat):
    """The layout of z-lab's own drafts."""

    name = "zlab_dflash"
    model_class = "DFlashDraftModel"
    sglang_algorithm = "DFLASH"

    def find_vllm_method(self, draft: CanonicalDraft) -> str | None:
        """Return vLLM's name for drafting with such a file; None where it would compute another draft."""
        return "dflash"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        if draft.options.sliding_window is not None:
            return (
                "SGLang whose DFlash reads `layer_types`: an older one would compute full attention without an error. And vLLM, which "
                "counts the window from each token of a block: its last one sees up to block_size - 1 positions fewer there."
            )
        return "SGLang with DFlash (`--speculative-algorithm DFLASH`), z-lab's own code, and vLLM."

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        by_sglang = {
            "SGLang": f"python -m sglang.launch_server --model-path {locate_model(draft.target)} "
            f"--speculative-algorithm {self.sglang_algorithm} --speculative-draft-model-path {folder}"
        }
        method = self.find_vllm_method(draft)
        if method is None:
            return by_sglang
        return by_sglang | build_vllm_command(draft, folder, method, self.count_tokens(draft))

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        config = draft.config
        return {
            "architectures": [self.model_class],
            "model_type": "qwen3",
            "num_hidden_layers": config["num_layers"],
            **build_layer_keys(draft, dtype),
            **build_layer_type_keys(draft.options.layer_windows()),
            "block_size": config["block_size"],
            "num_target_layers": config["num_target_layers"],
            "dflash_config": {
                "mask_token_id": config["mask_token_id"],
                "target_layer_ids": to_format(self.name, draft.taps),
                **self.build_head_keys(draft),
            },
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = "DFlashDraftModel" in (config.get("architectures") or [])
        return known and not (is_domino(config) or is_dspark(config) or is_speculators(config))

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        refuse_other_strategies(config, where)
        block = require(config, "dflash_config", where)
        layers = config.get("num_target_layers", target.num_layers)
        if layers != target.num_layers:
            raise ConfigError(f"{where}: num_target_layers {layers}: the target has {target.num_layers} layers")
        sizes = read_layer_sizes(config, where)
        windows = read_windows(config, sizes["num_layers"], where)
        refuse_other_arithmetic(config, windows, where)
        return DraftShape(
            strategy=self.strategy,
            taps=from_format(self.name, require(block, "target_layer_ids", f"{where}: dflash_config")),
            draft_vocab_size=None,
            options=build_block_options(
                config.get("block_size") or require(block, "block_size", where),
                require(block, "mask_token_id", f"{where}: dflash_config"),
                windows,
                "token",
            ),
            **sizes,
        )
