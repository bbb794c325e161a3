"""The probe of an engine has to reach a layer that drafts read."""

from __future__ import annotations

import pytest

from draftworks.targets.safetensors_headers import read_header

ENTRY = {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64, "layer_ids": [2, 4, 5]}}}


def size_of(fleet, layers: int) -> float:
    """GB of the tiny target's first layers."""
    header = read_header(fleet.tiny_folder / "model.safetensors")
    width = {"F32": 4, "BF16": 2, "F16": 2}
    below = tuple(f"model.layers.{layer}." for layer in range(layers))
    found = [one for name, one in header.items() if name.startswith(below)]
    total = 0
    for one in found:
        count = width[one.dtype]
        for size in one.shape:
            count *= size
        total += count
    return total / 1e9


@pytest.mark.parametrize(
    ("share", "allowed", "refused"), [(0.5, False, True), (0.5, True, False), (1.0001, False, False)]
)
def test_a_budget_below_the_lowest_tap_is_refused(fleet, share: float, allowed: bool, refused: bool):
    capture = {"probe_gb": size_of(fleet, 2) * share, "allow_unprobed": allowed}
    fleet.write(strategies=ENTRY, capture=capture)
    errors = fleet.check().errors
    assert len(errors) == refused
    assert all("of the 2 layer(s) before the first that drafts read" in error for error in errors)
