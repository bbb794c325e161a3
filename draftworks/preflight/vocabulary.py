"""What a draft's reduced vocabulary has of the held-out labels, once a run has counted it. Torch-free."""

from __future__ import annotations

from contextlib import suppress

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import DraftworksError
from draftworks.preflight.compatibility import resolve_draft_vocab_size
from draftworks.preflight.findings import Findings
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.asset_names import VOCAB_MAPPING

HELDOUT_COVERAGE = "heldout_coverage"
LEAST_COVERAGE = 0.95
"""Share of held-out labels below which the vocabulary is worth a word: it caps what any draft can have accepted."""


def check_coverage(target: TargetSpec, artifacts: ArtifactStore, findings: Findings) -> None:
    """Warn of a vocabulary that a run before has found to lack many held-out labels, where its size is still asked for."""
    with suppress(DraftworksError):  # sizes that differ and damaged results are told by who needs them
        made, size = artifacts.find(VOCAB_MAPPING, target.name), resolve_draft_vocab_size(target)
        if made is not None and made.summary.get("draft_vocab_size") == size and is_low(made):
            findings.warning(f"target {target.name}: {describe_coverage(made)}")


def is_low(made: Artifact) -> bool:
    """Whether a mapping lacks more of the held-out labels than `LEAST_COVERAGE` leaves; a mapping from before: no."""
    return made.summary.get(HELDOUT_COVERAGE, 1.0) < LEAST_COVERAGE


def describe_coverage(made: Artifact) -> str:
    """Return the shares of labels that a mapping has, and what follows."""
    size, of = made.summary["draft_vocab_size"], made.summary["vocab_size"]
    return (
        f"the draft's vocabulary ({size:,} of {of:,} tokens) has {made.summary[HELDOUT_COVERAGE]:.1%} of the held-out labels "
        f"({made.summary['coverage']:.1%} of those trained on): no draft is right more often. Raise draft_vocab_size, or train "
        "on more answers"
    )
