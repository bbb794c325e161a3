"""Numbers in sentences."""

from __future__ import annotations

import pytest

from draftworks.storage.words import format_count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 windows"), (1, "1 window"), (2, "2 windows"), (1200, "1,200 windows")]
)
def test_one_is_singular_and_all_others_plural(count: int, text: str):
    assert format_count(count, "window") == text
