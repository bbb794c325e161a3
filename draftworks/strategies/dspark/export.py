"""Export formats of DSpark: those of DFlash, with the tensors of the heads and their keys in config.json."""

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
    is_dspark,
    read_head_settings,
    refuse_part_of_vocabulary,
)

_KEYS = {
    "markov_head_type": "markov_head_type",
    "markov_rank": "markov_rank",
    "confidence_head": "enable_confidence_head",
    "confidence_with_markov": "confidence_head_with_markov",
}
"""What DeepSpec, SpecForge, speculators and SGLang call our options."""
MODELOPT_CONFIDENCE, MODELOPT_FROM_ANCHOR = "use_confidence_head", "shift_label"
HEAD_KEYS = (*_KEYS.values(), MODELOPT_CONFIDENCE, "sample_from_anchor", MODELOPT_FROM_ANCHOR)
"""All keys of the heads that `read_heads` looks up."""
_MARKOV, _OF_MARKOV = "markov_head.", ("markov_w1", "markov_w2", "gate_proj", "joint_proj")


class DSparkHeads(DFlashFormat):
    """Mixin that adds the heads to a format of DFlash, which follows it among the bases. Exported names have no prefix for
    the backbone."""

    strategy = "dspark"
    head_keys = _KEYS
    prefixes = BACKBONE

    def count_tokens(self, draft: CanonicalDraft) -> int:
        return draft.config["block_size"]

    def list_head_tensors(self, shape: DraftShape) -> Shapes:
        return _list_markov_tensors(shape) | _list_confidence_tensors(shape)

    def to_canonical_name(self, name: str) -> str:
        """See the base. ModelOpt's names have no prefix for the heads."""
        name = super().to_canonical_name(name)
        part, _, rest = name.partition(".")
        if part in _OF_MARKOV:
            return f"{_MARKOV}{name}"
        if part == "confidence_proj":
            return f"confidence_head.proj.{rest}"
        return name


def read_heads(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of the heads from the keys of a config.json, with SGLang's defaults for missing ones.

    Raises:
        ConfigError: no `markov_rank`, an unknown head, or a draft whose first proposal is made after the anchor's row.
    """
    for key in ("sample_from_anchor", MODELOPT_FROM_ANCHOR):
        if settings.get(key) is False:
            raise ConfigError(f"{where}: {key}: false: DSpark drafts here propose from the anchor's own place on")
    rank, kind = require(settings, _KEYS["markov_rank"], where), settings.get(_KEYS["markov_head_type"], "vanilla")
    if not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"{where}: {_KEYS['markov_rank']}: expected an integer from 0, found {rank!r}")
    if kind not in _MARKOV_TENSORS:
        expected = ", ".join(_MARKOV_TENSORS)
        raise ConfigError(f"{where}: {_KEYS['markov_head_type']}: expected one of {expected}, found {kind!r}")
    return {
        "markov_head_type": kind,
        "markov_rank": rank,
        "confidence_head": settings.get(_KEYS["confidence_head"], settings.get(MODELOPT_CONFIDENCE, True)),
        "confidence_with_markov": settings.get(_KEYS["confidence_with_markov"], rank != 0),
    }


def _list_vanilla_tensors(rank: int, hidden: int) -> Shapes:
    return {}


def _list_gated_tensors(rank: int, hidden: int) -> Shapes:
    return {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}


def _list_rnn_tensors(rank: int, hidden: int) -> Shapes:
    return {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}


_MARKOV_TENSORS = {"vanilla": _list_vanilla_tensors, "gated": _list_gated_tensors, "rnn": _list_rnn_tensors}
"""Shapes of the tensors of each kind of Markov head, beside the two matrices that all have."""


def _list_markov_tensors(shape: DraftShape) -> Shapes:
    rank, kind = shape.options["markov_rank"], shape.options["markov_head_type"]
    if rank == 0:
        return {}
    matrix = (shape.vocab_size, rank)
    names = {"markov_w1.weight": matrix, "markov_w2.weight": matrix, **_MARKOV_TENSORS[kind](rank, shape.hidden_size)}
    return {f"{_MARKOV}{name}": size for name, size in names.items()}


def _list_confidence_tensors(shape: DraftShape) -> Shapes:
    options = shape.options
    if not options["confidence_head"]:
        return {}
    inputs = shape.hidden_size + (options["markov_rank"] if options["confidence_with_markov"] else 0)
    return {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}


class SpeculatorsDSpark(DSparkHeads, SpeculatorsDFlash):
    name = "speculators_dspark"
    model_class = "DSparkSpeculator"

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        if not _is_computed_by_vllm(draft):
            return "speculators 0.9.0. Not vLLM, whose DSpark has the vanilla Markov head and no other."
        return (
            "speculators 0.9.0, and vLLM with DSpark that reads `sample_from_anchor` (#48639), as 0.32 and 0.33 do on GPUs; 0.26 "
            "ignored it and took the first proposal from another place."
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        return super().build_serve_commands(draft, folder) if _is_computed_by_vllm(draft) else {}

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        return {**super().build_config(draft, dtype), "sample_from_anchor": True}

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        heads = read_heads(config, "config.json")
        backbone = super().read_shape({**config, "sample_from_anchor": False}, target)
        return add_options(backbone, heads)


def _is_computed_by_vllm(draft: CanonicalDraft) -> bool:
    return draft.options.markov_head_type == "vanilla" and draft.options.markov_rank > 0


_MOVED = ("mask_token_id", "target_layer_ids")
"""Keys of `dflash_config` that DeepSpec, which has no such object, writes at the top level."""


class ZlabDSpark(DSparkHeads, ZlabDFlash):
    """The keys of the heads are written in `dflash_config` and beside it: SGLang builds the heads by the latter, others read
    the former."""

    name = "zlab_dspark"
    model_class = "DSparkDraftModel"
    """Of SpecForge, and one of those that SGLang loads."""
    sglang_algorithm = "DSPARK"

    def find_vllm_method(self, draft: CanonicalDraft) -> str | None:
        return "dspark" if _is_computed_by_vllm(draft) else None

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        modes = (
            "it looks at the confidences only where SGLANG_RAGGED_VERIFY_MODE is not `static`, the default"
            if draft.options.confidence_head
            else "SGLANG_RAGGED_VERIFY_MODE has to stay `static`, the default: the other modes need a confidence head"
        )
        vllm = (
            "vLLM from 0.32 on with `method` `dspark`, on GPUs; on a CPU its model computes our tokens."
            if _is_computed_by_vllm(draft)
            else "Not vLLM, whose DSpark has the vanilla Markov head and no other."
        )
        return (
            f"SGLang 0.5.23 with DSpark (`--speculative-algorithm DSPARK`), on CUDA, NPU or XPU only; {modes}. "
            f"{vllm} SpecForge 0.2.0, to go on training."
        )

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        config, heads = super().build_config(draft, dtype), self.build_head_keys(draft)
        # SpecForge takes heads without grouping for a mistake unless it is told.
        attention = "mha" if config["num_attention_heads"] == config["num_key_value_heads"] else "gqa"
        inside = {**config["dflash_config"], "projector_type": "dspark", "attention_mode": attention}
        return {
            **config,
            **heads,
            "sample_from_anchor": True,
            "dflash_config": inside,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return is_dspark(config) and not is_speculators(config)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        settings = read_head_settings(config, (*HEAD_KEYS, "projector_type", *_MOVED), where)
        backbone_config = drop_head_keys(config, settings)
        backbone_config["dflash_config"] |= {key: settings[key] for key in _MOVED if key in settings}
        backbone = super().read_shape(backbone_config, target)
        refuse_part_of_vocabulary(config, backbone.vocab_size, self.strategy, where)
        return add_options(backbone, read_heads(settings, where))
