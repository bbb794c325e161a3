"""What the export formats of DFlash have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes

FULL, SLIDING = "full_attention", "sliding_attention"
_SAME_NAMES = (
    *("hidden_size", "head_dim", "num_heads", "num_kv_heads", "intermediate_size", "num_layers"),
    *("vocab_size", "rms_norm_eps"),
)
"""Fields of a `DraftShape` that our own config has under the same names."""


class DFlashFormat(ExportFormat):
    """All of them hold the same tensors under our own names; embedding and head are the target's and are not written."""

    strategy = "dflash"

    def described(self, draft: CanonicalDraft) -> DraftShape:
        config = draft.config
        return DraftShape(
            strategy=self.strategy,
            taps=draft.taps,
            draft_vocab_size=None,
            rope=dict(config["rope_parameters"]),
            options=block_options(config["block_size"], config["mask_token_id"], list(draft.options.windows())),
            **{name: config[name] for name in _SAME_NAMES},
        )

    def tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return dict(draft.weights)

    def expected_tensors(self, shape: DraftShape) -> Shapes:
        hidden = shape.hidden_size
        names: Shapes = {
            "fc.weight": (hidden, len(shape.taps) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(shape.num_layers):
            names |= _layer_tensors(f"layers.{layer}.", shape)
        return names

    def canonical_name(self, name: str) -> str:
        return name.removeprefix("model.")


def _layer_tensors(layer: str, shape: DraftShape) -> Shapes:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (queries, hidden),
        f"{layer}self_attn.k_proj.weight": (keys, hidden),
        f"{layer}self_attn.v_proj.weight": (keys, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}self_attn.q_norm.weight": (shape.head_dim,),
        f"{layer}self_attn.k_norm.weight": (shape.head_dim,),
        f"{layer}mlp.gate_proj.weight": (wide, hidden),
        f"{layer}mlp.up_proj.weight": (wide, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, wide),
    }


def block_options(block_size: int, mask_token_id: int, windows: list[int | None]) -> dict[str, Any]:
    """Options of the strategy that decide what a block computes.

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
    }


def layer_type_keys(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Keys of Qwen3 that say which layers have a window; none is left to the defaults, which differ by version."""
    sliding = [window for window in windows if window is not None]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "use_sliding_window": bool(sliding),
        "sliding_window": sliding[0] if sliding else None,
        "max_window_layers": len(windows),
    }


def read_windows(config: Mapping[str, Any], num_layers: int, where: str) -> list[int | None]:
    """The window of every layer.

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


def is_domino(config: Mapping[str, Any]) -> bool:
    """Whether a config of DFlash's layout is of a Domino draft, which by SpecForge's class name it is too."""
    projector = (config.get("dflash_config") or {}).get("projector_type", config.get("projector_type"))
    return projector == "domino" or "DominoDraftModel" in (config.get("architectures") or [])


def refuse_other_strategies(config: Mapping[str, Any], where: str) -> None:
    """ConfigError for drafts that share DFlash's class name and compute more, such as DSpark."""
    dflash = config.get("dflash_config") or {}
    found = [
        key for key in ("projector_type", "markov_rank", "prefix_gru", "emb_dim") if config.get(key, dflash.get(key))
    ]
    if found:
        raise ConfigError(f"{where}: {', '.join(found)}: a draft of another strategy that is built on DFlash")
