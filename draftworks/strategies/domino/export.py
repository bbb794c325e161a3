"""Export format of Domino: z-lab's layout of DFlash with the tensors of the correction, as SGLang and SpecForge read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import is_speculators, require
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.strategies.dflash.export import (
    BACKBONE,
    ZlabDFlash,
    add_options,
    drop_head_keys,
    is_domino,
    read_head_settings,
)

_CLASS_NAMES = ("DFlashDraftModel", "DominoDraftModel")
"""SGLang loads the first, which is what we write; the second is SpecForge's own."""
_OPTIONS = ("shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
"""Keys of the correction, called as our options are: in `dflash_config`, or beside it."""


class ZlabDomino(ZlabDFlash):
    """The backbone as in DFlash's formats. Canonical names have prefixes for backbone and correction, exported ones none."""

    name = "zlab_domino"
    strategy = "domino"
    head_keys = dict(zip(_OPTIONS, _OPTIONS))
    prefixes = {**BACKBONE, "correction.": ("prefix_gru", "embed_proj")}

    def find_vllm_method(self, draft: CanonicalDraft) -> str | None:
        """See the base. The class name is DFlash's, and vLLM knows no correction."""
        return None

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        return (
            "SGLang 0.5.23 with Domino (`--speculative-algorithm DFLASH`), on CUDA and in bfloat16 only. It corrects 2,048 candidates "
            "by default, `--speculative-domino-candidate-pool-size 0` the whole vocabulary. SpecForge 0.2.0 loads it to go on training where "
            f"`architectures` of config.json is made {_CLASS_NAMES[1]}: SGLang knows it as {_CLASS_NAMES[0]} only."
        )

    def build_head_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        return {"projector_type": "domino", **super().build_head_keys(draft)}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = any(name in (config.get("architectures") or []) for name in _CLASS_NAMES)
        return known and is_domino(config) and not is_speculators(config)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json: dflash_config"
        keys = ("projector_type", *_OPTIONS)
        backbone = super().read_shape(drop_head_keys(config, keys), target)
        projector = read_head_settings(config, keys, where)
        return add_options(backbone, {key: require(projector, key, where) for key in _OPTIONS})

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        narrow, state, hidden = shape.options["emb_dim"], shape.options["gru_hidden_dim"], shape.hidden_size
        return {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (narrow, hidden + state),
            "embed_proj.2.weight": (shape.vocab_size, narrow),
        }
