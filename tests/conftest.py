"""Fixtures shared by all rooms: the embedded tiny target."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.runs import TargetFiles

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return ROOT / "registry" / "models" / "tiny"


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> TargetFiles:
    return TargetFiles(
        name="tiny",
        model=str(tiny_folder),
        tokenizer=str(tiny_folder),
        digest="0123456789abcdef",
        tokenizer_digest="fedcba9876543210",
        num_layers=8,
        hidden_size=128,
        vocab_size=2048,
        context=512,
    )
