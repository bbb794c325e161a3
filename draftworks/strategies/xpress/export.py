"""Export format of XPress: speculators' layout of DFlash with the refiner and its keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import name_releases
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import BACKBONE, SpeculatorsDFlash, add_options

_KEYS = {"refiner_rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio", "jacobi_passes": "num_jacobi_passes"}
"""What speculators calls our options."""
_DEFAULTS = {"xpress_rank": 256, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
"""Of speculators 0.9.0, for keys that a config.json leaves out."""


class SpeculatorsXPress(SpeculatorsDFlash):
    """The backbone as in DFlash's format. Exported names have no prefix for it, and `refiner_head.` for the refiner."""

    name = "speculators_xpress"
    strategy = "xpress"
    head_keys = _KEYS
    prefixes = BACKBONE
    model_class = "XPressSpeculator"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            f"speculators 0.9.0. Not vLLM: {name_releases()} refuse speculators' files of XPress. 0.33 has XPress in a form of its own "
            "(architecture `Qwen3XPressModel`, the refiner under `xpress_head.`), which is not written here."
        )

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
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
        return {f"refiner_head.{name}": size for name, size in refiner.items()}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        backbone = super().read_shape(config, target)
        options = {option: config.get(key, _DEFAULTS[key]) for option, key in _KEYS.items()}
        for option, value in options.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json: {_KEYS[option]}: expected an integer from 1, found {value!r}")
        return add_options(backbone, options)
