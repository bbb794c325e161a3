"""Convert the tensors of another system's checkpoint to those of the canonical one; none is ignored."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import StoreError
from draftworks.export.checkpoint_files import Checkpoint
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes
from draftworks.export.gates import find_vocabulary_problem
from draftworks.storage.words import list_names

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
