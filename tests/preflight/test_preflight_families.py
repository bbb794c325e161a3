"""A target of every family passes `draftworks check`, with a draft of every strategy that trains for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_families import DRAFT_OPTIONS, FAMILIES
from mtp_toys import KINDS

from draftworks.config.run_files import TargetFiles

SCALED = ("gemma3_text", "gemma3")
"""Families that multiply their embeddings."""
MakeTarget = Callable[[str], TargetFiles]


def entries(strategies: dict[str, dict]) -> dict[str, dict[str, Any]]:
    return {strategy: {"options": options} for strategy, options in strategies.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_draft_for_a_family_passes(fleet, name: str, family_target: MakeTarget):
    strategies = entries(DRAFT_OPTIONS)
    if name in SCALED:
        strategies["xpress"]["export"] = {"formats": []}  # its one format is read without the scale
    fleet.write(model=family_target(name).model, strategies=strategies)
    assert fleet.check().errors == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_its_own_passes(fleet, kind: str, mtp_target: MakeTarget):
    fleet.write(model=mtp_target(kind).model, strategies=entries({"mtp": {}}))
    assert fleet.check().errors == []
