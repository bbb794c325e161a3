"""The memory of a stream's Mooncake store."""

from __future__ import annotations

import pytest

from draftworks.mooncake.service import MIN_SEGMENT_BYTES
from draftworks.programs.memory import find_segment_bytes


@pytest.mark.parametrize("peak", [0, 1, 10**6, 10**9, 10**12])
def test_the_memory_holds_a_fifth_more_than_the_features_and_is_never_too_small_to_own(peak: int):
    """Mooncake rounds objects up and leaves holes; a store without room stands still."""
    found = find_segment_bytes(peak)
    assert found >= 1.2 * peak
    assert found >= peak + MIN_SEGMENT_BYTES
    assert found <= 1.3 * peak + 8 * MIN_SEGMENT_BYTES
