"""What is listed to be measured is listed once: a repetition has no meaning."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from draftworks.config.registry_files import TargetSpec

ENTRY = {"name": "t", "model": "m", "dataset": "d"}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"evaluation": {"slices": ["length", "topic", "length"]}}, "length"),
        ({"evaluation": {"loop": {"temperatures": [0, 0.7, 0.0]}}}, "0.0"),
        ({"evals": ["code", "code"]}, "code"),
    ],
)
def test_what_is_listed_twice_is_refused(entry: dict[str, Any], found: str):
    with pytest.raises(ValidationError, match=f"expected each once, found {found} twice"):
        TargetSpec.model_validate({**ENTRY, **entry})


def test_empty_and_different_ones_are_taken():
    entry = {"evaluation": {"slices": [], "loop": {"temperatures": [0, 0.7]}}, "evals": ["code", "chats"]}
    assert TargetSpec.model_validate({**ENTRY, **entry}).evals == ["code", "chats"]
