"""One draft computed twice: by our own drafter, and from the exported files by a reader that shares no code with it."""

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
    """The exported draft, checked for everything that loaders pass over in silence.

    Args:
        dtype: what to compute in, whatever the file holds.

    Raises:
        ConfigError: no such format.
        StoreError: the files are not a draft of that format for this target.
    """
    read = load_dotted(resolve_export(export_format).reader)
    return read(ExportFolder.read(folder), target, dtype)


CONTEXTS = (1, 2, 7, 24)
"""Lengths of the made-up sequences."""
_LEAST = 1e-30
"""Probabilities below are taken for this: fp32 rounds them to nothing or not, as it happens."""


@dataclass(frozen=True)
class LogitsComparison:
    """Over `compared` log probabilities.

    Attributes:
        largest: difference.
        relative: the same in shares of how far the log probabilities of its step range, as rounding errors grow with it.
    """

    largest: float
    relative: float
    compared: int
    contexts: tuple[int, ...] = CONTEXTS


def compare_with_reader(
    folder: Path, export_format: str, draft: CanonicalDraft, strategy: DraftStrategy, dtype: torch.dtype
) -> LogitsComparison:
    """Ask both for the same proposals after random features, always the same, of several lengths.

    Both round the target's embedding and head to the export's dtype too: a server of that dtype lends them so.

    Args:
        strategy: the draft with weights rounded to `dtype`, computing in fp32.

    Raises:
        StoreError: the files are not a draft of that format for this target.
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
    """Log probabilities (k, V) of the same proposal."""

    ours: Tensor
    theirs: Tensor


def _ask_both(reader: ExportReader, strategy: DraftStrategy, length: int, draft: CanonicalDraft) -> _Answers:
    generator = torch.Generator().manual_seed(length)
    width, vocab = draft.parts.hidden_size, draft.parts.vocab_size
    # Of every layer: a file that names others than the draft's own gets what a server would give it for them.
    layers = [LayerTap(layer).name for layer in range(draft.parts.num_layers)]
    features = {name: torch.randn(length, width, generator=generator) for name in layers}
    tokens = torch.randint(vocab, (length,), generator=generator)
    drafter = strategy.drafter()
    drafter.extend(features, tokens)
    proposal = drafter.propose(strategy.draft_tokens, temperature=1.0, generator=generator)
    theirs = reader.log_probabilities(features, tokens, proposal.tokens).exp()
    ours = proposal.probabilities
    assert ours is not None, "a proposal at temperature 1 has probabilities"
    return _Answers(ours.clamp_min(_LEAST).log(), theirs.clamp_min(_LEAST).log())
