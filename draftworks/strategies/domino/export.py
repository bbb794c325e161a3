"""Export format of Domino: z-lab's layout of DFlash with the tensors of the correction, as SGLang and SpecForge read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.layer_keys import require
from draftworks.export.speculators_keys import is_speculators
from draftworks.strategies.dflash.export import ZlabDFlash, drop_head_keys, is_domino, read_head_settings

_CLASS_NAMES = ("DFlashDraftModel", "DominoDraftModel")
"""SGLang loads the first, which is what we write; the second is SpecForge's own."""
_PROJECTOR = ("projector_type", "shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
"""Keys of the correction: in `dflash_config`, or beside it."""
_CORRECTION, _OF_CORRECTION = "correction.", ("prefix_gru", "embed_proj")
_BACKBONE, _OF_BACKBONE = "backbone.", ("fc", "hidden_norm", "layers", "norm")


class ZlabDomino(ZlabDFlash):
    """The backbone as in DFlash's formats. Canonical names have prefixes for backbone and correction, exported ones none."""

    name = "zlab_domino"
    strategy = "domino"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "SGLang 0.5.23 with Domino (`--speculative-algorithm DFLASH`), on CUDA and in bfloat16 only. It corrects 2,048 candidates "
            "by default, `--speculative-domino-candidate-pool-size 0` the whole vocabulary. SpecForge 0.2.0 loads it to go on training where "
            f"`architectures` of config.json is made {_CLASS_NAMES[1]}: SGLang knows it as {_CLASS_NAMES[0]} only."
        )

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        backbone = super().derive_shape(draft)
        return replace(backbone, options={**backbone.options, **_select_projector_options(draft)})

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        config = super().build_config(draft, dtype)
        config["dflash_config"] |= {"projector_type": "domino", **_select_projector_options(draft)}
        return config

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = any(name in (config.get("architectures") or []) for name in _CLASS_NAMES)
        return known and is_domino(config) and not is_speculators(config)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json: dflash_config"
        backbone = super().read_shape(drop_head_keys(config, _PROJECTOR), target)
        projector = read_head_settings(config, _PROJECTOR, where)
        options = {key: require(projector, key, where) for key in _PROJECTOR if key != "projector_type"}
        return replace(backbone, options={**backbone.options, **options})

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {name.removeprefix(_BACKBONE).removeprefix(_CORRECTION): one for name, one in draft.weights.items()}

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        narrow, state, hidden = shape.options["emb_dim"], shape.options["gru_hidden_dim"], shape.hidden_size
        return super().list_expected_tensors(shape) | {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (narrow, hidden + state),
            "embed_proj.2.weight": (shape.vocab_size, narrow),
        }

    def to_canonical_name(self, name: str) -> str:
        name = super().to_canonical_name(name)
        part = name.split(".", 1)[0]
        if part in _OF_CORRECTION:
            return f"{_CORRECTION}{name}"
        return f"{_BACKBONE}{name}" if part in _OF_BACKBONE else name


def _select_projector_options(draft: CanonicalDraft) -> dict[str, Any]:
    return {key: getattr(draft.options, key) for key in _PROJECTOR if key != "projector_type"}
