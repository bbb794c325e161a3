"""What the draft's vocabulary lacks of the held-out labels is said before a training is paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftworks.preflight.examine import examine_entry
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.identity import FileDigests

COUNTED = {"draft_vocab_size": 64, "vocab_size": 2048, "coverage": 1.0}


def list_warnings(fleet, var: Path, summary: dict[str, Any]) -> list[str]:
    ArtifactStore(var).obtain("vocab_mapping", "small", summary, lambda out: BuildResult("v", summary))
    found = examine_entry("small", fleet.registry, FileDigests(), var)
    return [one.text for one in found if "vocabulary" in one.text]


def test_a_vocabulary_that_lacks_held_out_labels_is_a_warning(fleet, tmp_path):
    """It had all labels of the training: that share says nothing of other answers."""
    [warning] = list_warnings(fleet, tmp_path / "var", {**COUNTED, "heldout_coverage": 0.9})
    assert "(64 of 2,048 tokens) has 90.0% of the held-out labels (100.0% of those trained on)" in warning


@pytest.mark.parametrize(
    "summary",
    [
        {**COUNTED, "heldout_coverage": 0.97},
        COUNTED,
        {**COUNTED, "draft_vocab_size": 32, "heldout_coverage": 0.5},
    ],
    ids=["enough", "made before it was counted", "of another size"],
)
def test_what_is_enough_or_not_known_is_none(fleet, tmp_path, summary):
    assert list_warnings(fleet, tmp_path / "var", summary) == []
