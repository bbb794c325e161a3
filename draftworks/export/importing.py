"""Import a checkpoint of other software as a canonical draft, to be evaluated or trained further."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.run_files import VOCAB_FILE, TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.canonical_weights import convert_weights
from draftworks.export.checkpoint_files import CONFIG, read_checkpoint, read_object
from draftworks.export.export_format import DraftShape, ExportFormat, list_formats, load_format
from draftworks.export.imported_options import derive_options
from draftworks.export.names import NORM_OUTPUT_MEANS, PROVENANCE
from draftworks.storage.files import describe_changes, publish_folder

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


def import_draft(source: Path, target: TargetFiles, out: Path, norm_output_means: str | None = None) -> ImportedDraft:
    """Import a checkpoint, of whatever known format, as a canonical draft into `out`, a new folder, complete or absent.

    Known are our own drafts, speculators (EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark), SGLang's EAGLE-3 with its relatives from
    SpecForge and ModelOpt, z-lab's DFlash, DFlash 2 and Domino, and DSpark of SpecForge, DeepSpec and ModelOpt. Weights become
    fp32 without loss.

    Args:
        norm_output_means: `specforge` (0.2.0) or `sglang`, where an EAGLE-3 draft of SGLang's layout has this key, which
            has two meanings; default what its config.json says, or else SpecForge.

    Raises:
        ConfigError: `out` exists, and is left as it is; not one of these; a draft that computes what no strategy here
            does; or one for a target of other sizes.
        StoreError: a file is missing or damaged, or tensors are missing, unknown or contradict each other.
    """
    _require_new(out)
    config = read_object(source / CONFIG)
    if norm_output_means is not None:
        config[NORM_OUTPUT_MEANS] = norm_output_means
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
