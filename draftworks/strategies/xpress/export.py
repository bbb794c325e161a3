"""Export format of XPress: speculators' layout of DFlash with the refiner and its keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.speculators_keys import build_speculators_keys, build_vllm_commands
from draftworks.export.vllm_releases import name_releases
from draftworks.strategies.dflash.export import SpeculatorsDFlash

_KEYS = {"refiner_rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio", "jacobi_passes": "num_jacobi_passes"}
"""What speculators calls our options."""
_DEFAULTS = {"xpress_rank": 256, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
"""Of speculators 0.9.0, for keys that a config.json leaves out."""
_BACKBONE, _OF_BACKBONE = "backbone.", ("fc", "hidden_norm", "layers", "norm")


class SpeculatorsXPress(SpeculatorsDFlash):
    """The backbone as in DFlash's format. Exported names have no prefix for it, and `refiner_head.` for the refiner."""

    name = "speculators_xpress"
    strategy = "xpress"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            f"speculators 0.9.0. Not vLLM: {name_releases()} refuse speculators' files of XPress. 0.33 has XPress in a form of its own "
            "(architecture `Qwen3XPressModel`, the refiner under `xpress_head.`), which is not written here."
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return build_vllm_commands(draft, folder, "xpress", draft.config["block_size"] - 1)

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        backbone = super().derive_shape(draft)
        return replace(backbone, options={**backbone.options, **{o: getattr(draft.options, o) for o in _KEYS}})

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {name.removeprefix(_BACKBONE): tensor for name, tensor in draft.weights.items()}

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        options, hidden, vocab = shape.options, shape.hidden_size, shape.vocab_size
        rank, block = options["refiner_rank"], options["block_size"]
        wide = rank * options["mlp_ratio"]
        refiner: Shapes = {
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
        return super().list_expected_tensors(shape) | {f"refiner_head.{name}": size for name, size in refiner.items()}

    def to_canonical_name(self, name: str) -> str:
        name = super().to_canonical_name(name)
        return f"{_BACKBONE}{name}" if name.split(".", 1)[0] in _OF_BACKBONE else name

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        return {
            **super().build_config(draft, dtype),
            "architectures": ["XPressSpeculator"],
            **build_speculators_keys("xpress", draft.target, draft.config["block_size"] - 1),
            **{key: getattr(draft.options, option) for option, key in _KEYS.items()},
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "xpress"

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        backbone = super().read_shape(config, target)
        options = {option: config.get(key, _DEFAULTS[key]) for option, key in _KEYS.items()}
        for option, value in options.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json: {_KEYS[option]}: expected an integer from 1, found {value!r}")
        return replace(backbone, options={**backbone.options, **options})
