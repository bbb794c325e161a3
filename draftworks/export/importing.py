"""Import a checkpoint of other software as a canonical draft, to be evaluated or trained further.

Its tensors become those of the canonical checkpoint, and none is ignored; the options under which our strategy builds such a
draft are derived from its config.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftworks.config.draft_options import CONFIG
from draftworks.config.run_files import VOCAB_FILE, TargetFiles
from draftworks.config.strategies import StrategySpec, list_strategies, resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft, Checkpoint, read_checkpoint, read_object
from draftworks.export.conventions import LAYER_IDS_MEAN, NORM_OUTPUT_MEANS, PROVENANCE
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes, list_formats, load_format
from draftworks.export.vocabulary import find_vocabulary_problem
from draftworks.storage.files import describe_changes, publish_folder
from draftworks.storage.identity import LayerTap
from draftworks.storage.words import list_names

OWN = "draftworks"
"""The format of our own canonical drafts."""


@dataclass(frozen=True)
class ImportedDraft:
    """A canonical draft made from a checkpoint of `format`; the folder holds its vocabulary mapping too.

    Attributes:
        remarks: how ambiguous keys of the checkpoint were read.
    """

    folder: Path
    format: str
    strategy: str
    options: dict[str, Any]
    vocab: VocabMapping | None
    remarks: tuple[str, ...] = ()


def import_draft(
    source: Path,
    target: TargetFiles,
    out: Path,
    norm_output_means: str | None = None,
    layer_ids_mean: str | None = None,
) -> ImportedDraft:
    """Import a checkpoint, of whatever known format, as a canonical draft into `out`, a new folder, complete or absent.

    Known are our own drafts, speculators (EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark), SGLang's EAGLE-3 with its relatives from
    SpecForge and ModelOpt, z-lab's DFlash, DFlash 2 and Domino, and DSpark of SpecForge, DeepSpec and ModelOpt. Weights become
    fp32 without loss.

    Args:
        norm_output_means: `specforge` (0.2.0) or `sglang`, where an EAGLE-3 draft of SGLang's layout has this key, which
            has two meanings; default what its config.json says, or else SpecForge.
        layer_ids_mean: `sglang` or `vllm`, by whom the layer ids of such a draft are to be understood; default what its
            config.json says.

    Raises:
        ConfigError: `out` exists, and is left as it is; not one of these; layer ids that mean either of two things; a draft that computes what no strategy here
            does; or one for a target of other sizes.
        StoreError: a file is missing or damaged, or tensors are missing, unknown or contradict each other.
    """
    _require_new(out)
    config = read_object(source / CONFIG)
    meant = {NORM_OUTPUT_MEANS: norm_output_means, LAYER_IDS_MEAN: layer_ids_mean}
    config |= {key: means for key, means in meant.items() if means is not None}
    if {"strategy", "draft", "weights_digest"} <= config.keys():
        return _import_own(source, target, out)
    export_format = recognise_format(source, config)
    parts = TargetParts.load(target)
    shape = _read_shape(source, config, export_format, target)
    _require_fit(source, shape, parts)
    unscaled = resolve_strategy(shape.strategy).export(export_format.name).find_embedding_refusal(parts.embedding_scale)
    if unscaled is not None:
        raise ConfigError(f"{source / CONFIG}: {unscaled}, so it was trained on other embeddings than drafts here read")
    checkpoint = read_checkpoint(source)
    weights = convert_weights(checkpoint, export_format, shape, parts)
    spec = resolve_strategy(shape.strategy)
    vocab = VocabMapping(weights["d2t"].numpy(), weights["t2d"].numpy()) if spec.uses_vocab_mapping else None
    origin = config.get(PROVENANCE) or {}
    options = derive_options(shape, parts, origin.get("options") or {}, where=str(source / CONFIG))
    try:
        strategy = spec.load_factory()(options, parts, vocab, 0)
    except ConfigError as error:
        raise ConfigError(f"{source / CONFIG}: {error}") from error
    strategy.model.load_state_dict(weights)
    remarks = tuple(export_format.list_remarks(config, checkpoint.tensors))
    imported = {"imported_from": source.name, "format": export_format.name, "origin": origin}
    if remarks:
        imported["remarks"] = list(remarks)
    with publish_folder(out) as staging:
        save_draft(staging, strategy, target.digest, provenance=imported)
        _save_vocab(staging, vocab)
    return ImportedDraft(out, export_format.name, shape.strategy, options.model_dump(mode="json"), vocab, remarks)


def recognise_format(source: Path, config: Mapping[str, Any]) -> ExportFormat:
    """Return the format of a config.json. Raises ConfigError if no format recognises it."""
    formats = [load_format(strategy, name) for strategy in list_strategies() for name in list_formats(strategy)]
    for export_format in formats:
        if export_format.recognises(config):
            return export_format
    kind = config.get("speculators_model_type") or config.get("architectures") or config.get("model_type")
    known = ", ".join(dict.fromkeys([OWN, *(found.name for found in formats)]))
    raise ConfigError(
        f"{source / CONFIG}: a model of kind {kind!r}: not a draft format that Draftworks reads ({known})"
    )


def _require_new(out: Path) -> None:
    """Raise ConfigError if `out` exists, as a dangling link too: publishing would replace a user's folder."""
    if os.path.lexists(os.path.abspath(out)):
        raise ConfigError(
            f"{out}: expected a path that does not exist, found a file or folder that an import would replace: "
            "give the path of a new folder, or remove this one first"
        )


def _import_own(source: Path, target: TargetFiles, out: Path) -> ImportedDraft:
    draft = CanonicalDraft.load(source, target)
    strategy = draft.build_strategy()
    with publish_folder(out) as staging:
        save_draft(staging, strategy, target.digest, provenance=draft.record.provenance)
        _save_vocab(staging, draft.vocab)
    return ImportedDraft(out, OWN, draft.record.strategy, dict(draft.config["options"]), draft.vocab)


def _save_vocab(folder: Path, vocab: VocabMapping | None) -> None:
    """Write the vocabulary mapping beside the draft; run files refer to it as a separate file."""
    if vocab is not None:
        vocab.save(folder / VOCAB_FILE)


def _read_shape(
    source: Path, config: Mapping[str, Any], export_format: ExportFormat, target: TargetFiles
) -> DraftShape:
    """Return the shape that the format reads; errors name the source folder."""
    try:
        return export_format.read_shape(config, target)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _require_fit(source: Path, shape: DraftShape, parts: TargetParts) -> None:
    wanted = {"hidden_size": parts.hidden_size, "vocab_size": parts.vocab_size}
    wrong = describe_changes(wanted, {key: getattr(shape, key) for key in wanted})
    outside = [tap.hf_index for tap in shape.taps if tap.hf_index >= parts.num_layers]
    if outside:
        wrong.append(f"layers {outside} as hf_index: the target has 0..{parts.num_layers - 1}")
    if wrong:
        raise ConfigError(
            f"{source / CONFIG}: a draft for another target than {parts.num_layers} layers of {parts.hidden_size}: "
            f"{'; '.join(wrong)}"
        )


def derive_options(shape: DraftShape, parts: TargetParts, hints: Mapping[str, Any], where: str) -> Any:
    """Return the typed options under which our strategy builds a draft of this shape.

    Sizes that equal the strategy's default for the target are not set.

    Args:
        hints: options of the original training, where the checkpoint has them; `shape` has precedence. Unknown names
            are ignored.

    Raises:
        ConfigError: a value that the strategy does not take.
    """
    spec = resolve_strategy(shape.strategy)
    known = spec.options.model_fields
    sizes = {
        **_list_sizes(shape, parts),
        "draft_vocab_size": shape.draft_vocab_size,
        "num_layers": shape.num_layers,
        "num_taps": len(shape.taps),
        "train_embeddings": shape.own_embedding,
        **shape.options,
    }
    values = {name: value for name, value in {**hints, **sizes}.items() if name in known}
    if values.get("mask_token_id") == parts.vocab_size - 1:
        values["mask_token_id"] = None
    if "layer_ids" not in known:
        return spec.parse_options(values, where=where)
    values["layer_ids"] = None
    if _find_default_taps(spec, values, parts.num_layers, where) != shape.taps:
        values["layer_ids"] = [tap.hf_index for tap in shape.taps]
    return spec.parse_options(values, where=where)


def _list_sizes(shape: DraftShape, parts: TargetParts) -> dict[str, Any]:
    defaults = {
        "head_dim": parts.head_dim,
        "rms_norm_eps": parts.rms_norm_eps,
        "rope": dict(parts.rope),
        "num_heads": parts.num_heads,
        "num_kv_heads": min(parts.num_kv_heads, shape.num_heads),
        "intermediate_size": parts.intermediate_size,
    }
    found = {name: getattr(shape, name) for name in defaults} | {"rope": dict(shape.rope)}
    return {name: None if size == defaults[name] else size for name, size in found.items()}


def _find_default_taps(
    spec: StrategySpec, values: Mapping[str, Any], num_layers: int, where: str
) -> tuple[LayerTap, ...] | None:
    """Return the strategy's default taps; None for a target that is not deep enough for them."""
    options = spec.parse_options(dict(values), where=where)
    try:
        return spec.taps(num_layers, options)
    except ConfigError:
        return None


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_TARGETS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's that no computation of a draft reads."""


def convert_weights(
    checkpoint: Checkpoint, export_format: ExportFormat, shape: DraftShape, parts: TargetParts
) -> dict[str, Tensor]:
    """Return the draft's own tensors under canonical names, floating point ones in fp32 (without loss).

    An embedding or a head in the file must equal the target's, unless the draft has its own. A draft with the target's full
    vocabulary may lack `d2t` and `t2d`, and also its head: the target's is used then.

    Raises:
        StoreError: tensors are missing, unknown, of another shape, not finite, or contradict each other.
    """
    folder, named = checkpoint.folder, _rename(checkpoint, export_format)
    _take_out_targets(folder, named, shape, parts)
    if shape.draft_vocab_size is not None:
        _complete_vocabulary(folder, named, shape, parts)
    _require_tensors(folder, _list_expected(export_format, shape), named)
    if shape.draft_vocab_size is not None:
        problem = find_vocabulary_problem(named["d2t"], named["t2d"], shape.vocab_size)
        if problem:
            raise StoreError(f"{folder}: {problem}")
    broken = [name for name, tensor in named.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise StoreError(f"{folder}: tensors that are not finite: {list_names(broken)}")
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in named.items()}


def _rename(checkpoint: Checkpoint, export_format: ExportFormat) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        canonical = export_format.to_canonical_name(name)
        if canonical in named:
            raise StoreError(f"{checkpoint.folder}: tensor {canonical} is in the file twice, once as {name}")
        named[canonical] = tensor
    return named


def _take_out_targets(folder: Path, named: dict[str, Tensor], shape: DraftShape, parts: TargetParts) -> None:
    """Remove copies of the target's tensors from `named`. Raises StoreError if one that the draft should share differs."""
    for name in _TARGETS_OWN:
        named.pop(name, None)
    shared = {} if shape.own_embedding else {EMBEDDING: parts.embedding}
    if shape.draft_vocab_size is None:
        shared[HEAD] = parts.head
    for name, targets in shared.items():
        found = named.pop(name, None)
        if found is not None and not _equal_rounded(found, targets):
            raise StoreError(
                f"{folder}: {name} differs from the target's, but by its config.json the draft has none of its own"
            )


def _equal_rounded(first: Tensor, second: Tensor) -> bool:
    """Return whether both are equal when rounded to the coarser of their dtypes."""
    coarser = min((first.dtype, second.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(first.to(coarser), second.to(coarser))


def _complete_vocabulary(folder: Path, named: dict[str, Tensor], shape: DraftShape, parts: TargetParts) -> None:
    """Add to `named` the vocabulary tensors that a file may leave out because they follow from the others."""
    if shape.draft_vocab_size == shape.vocab_size:
        named.setdefault("d2t", torch.zeros(shape.vocab_size, dtype=torch.int64))
        named.setdefault("t2d", torch.ones(shape.vocab_size, dtype=torch.bool))
        named.setdefault(HEAD, parts.head)
    if "d2t" in named and "t2d" not in named:
        named["t2d"] = _mark_members(folder, named["d2t"], shape.vocab_size)


def _mark_members(folder: Path, d2t: Tensor, vocab_size: int) -> Tensor:
    """Return `t2d` for a file that has only `d2t`."""
    if d2t.numel() > 1 and bool((d2t.diff() > 0).all()):
        # Ascending values are ids: as offsets they would mean that no two ids of the draft's vocabulary are adjacent.
        raise StoreError(f"{folder}: d2t holds the target's ids themselves; expected offsets, target id = i + d2t[i]")
    return torch.isin(torch.arange(vocab_size), d2t + torch.arange(d2t.numel()))


def _list_expected(export_format: ExportFormat, shape: DraftShape) -> Shapes:
    sizes = {
        export_format.to_canonical_name(name): size for name, size in export_format.list_expected_tensors(shape).items()
    }
    if not shape.own_embedding:
        sizes.pop(EMBEDDING, None)
    if shape.draft_vocab_size is not None:
        sizes |= {"d2t": (shape.draft_vocab_size,), "t2d": (shape.vocab_size,)}
    return sizes


def _require_tensors(folder: Path, expected: Shapes, found: dict[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise StoreError(
            f"{folder}: missing tensors: {', '.join(missing) or 'none'}; unknown tensors: {', '.join(unknown) or 'none'}"
        )
    for name, size in expected.items():
        if tuple(found[name].shape) != size:
            raise StoreError(f"{folder}: {name}: expected {size} as config.json says, found {tuple(found[name].shape)}")
