"""Compare our drafter with an independent reader of the exported files, which shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftworks.config.strategies import load_dotted, resolve_export
from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.canonical import CanonicalDraft, round_target
from draftworks.export.readers.files import ExportFolder
from draftworks.export.readers.reader import ExportReader, TargetTensors
from draftworks.storage.identity import LayerTap


def open_export(
    export_format: str, folder: Path, target: TargetTensors, dtype: torch.dtype = torch.float64
) -> ExportReader:
    """Open an exported draft with the independent reader of its format.

    Args:
        dtype: what to compute in, whatever the file holds.

    Raises:
        ConfigError: no such format.
        StoreError: a file is missing or unreadable, or lacks a value that the computation needs.
    """
    read = load_dotted(resolve_export(export_format).reader)
    return read(ExportFolder.read(folder), target, dtype)


CONTEXTS = (1, 2, 7, 24)
"""Lengths of the random sequences."""
_LEAST = 1e-30
"""Probabilities are clamped to this: below, fp32 may round them to 0."""


@dataclass(frozen=True)
class LogitsComparison:
    """Differences between drafter and reader over `compared` log probabilities.

    Attributes:
        largest: the largest difference.
        relative: the same, divided by the range of the log probabilities of its step, as rounding errors grow with it.
    """

    largest: float
    relative: float
    compared: int
    contexts: tuple[int, ...] = CONTEXTS


def compare_with_reader(
    folder: Path, export_format: str, draft: CanonicalDraft, strategy: DraftStrategy, dtype: torch.dtype
) -> LogitsComparison:
    """Compare both on the same proposals after fixed random features of several lengths.

    The target's embedding and head are rounded to the export's dtype too, as they are in a server of that dtype.

    Args:
        strategy: the draft with weights rounded to `dtype`, computing in fp32.

    Raises:
        StoreError: as `open_export`.
    """
    parts = round_target(draft.parts, dtype)
    target = TargetTensors(parts.embedding, parts.head, parts.embedding_scale)
    reader = open_export(export_format, folder, target, torch.float32)
    pairs = [_ask_both(reader, strategy, length, draft) for length in CONTEXTS]
    gaps = torch.cat([(pair.ours - pair.theirs).abs().amax(-1) for pair in pairs])
    ranges = torch.cat([pair.ours.amax(-1) - pair.ours.amin(-1) for pair in pairs])
    relative = gaps / ranges.clamp_min(1)
    return LogitsComparison(float(gaps.max()), float(relative.max()), sum(pair.ours.numel() for pair in pairs))


class _Answers(NamedTuple):
    """Log probabilities (k, V) of one proposal, by our drafter and by the reader."""

    ours: Tensor
    theirs: Tensor


def _ask_both(reader: ExportReader, strategy: DraftStrategy, length: int, draft: CanonicalDraft) -> _Answers:
    generator = torch.Generator().manual_seed(length)
    width, vocab = draft.parts.hidden_size, draft.parts.vocab_size
    # Features of every layer, and the last states, so that a file with wrong layer ids gets the streams that a server would give it.
    layers = [LayerTap(layer).name for layer in range(draft.parts.num_layers)]
    features = {name: torch.randn(length, width, generator=generator) for name in layers}
    tokens = torch.randint(vocab, (length,), generator=generator)
    features["last"] = torch.randn(length, width, generator=generator)
    drafter = strategy.drafter()
    drafter.extend(features, tokens)
    proposal = drafter.propose(strategy.draft_tokens, temperature=1.0, generator=generator)
    theirs = reader.log_probabilities(features, tokens, proposal.tokens).exp()
    ours = proposal.probabilities
    assert ours is not None, "a proposal at temperature 1 has probabilities"
    return _Answers(ours.clamp_min(_LEAST).log(), theirs.clamp_min(_LEAST).log())
