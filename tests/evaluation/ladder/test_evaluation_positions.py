"""Ranges of places in the text partition the walk, and their edges are powers of two."""

from __future__ import annotations

import pytest
import torch
from test_evaluation_replay import Scripted

from draftworks.evaluation.ladder.positions import describe_range, find_range_begin, join_samples
from draftworks.evaluation.ladder.replay import replay
from draftworks.features.contracts import TrainBatch


@pytest.mark.parametrize(
    ("place", "begin", "name"),
    [
        (0, 0, "0-255"),
        (255, 0, "0-255"),
        (256, 256, "256-511"),
        (511, 256, "256-511"),
        (512, 512, "512-1023"),
        (32767, 16384, "16384-32767"),
        (32768, 32768, "32768-65535"),
    ],
)
def test_a_range_begins_where_the_one_before_ends(place: int, begin: int, name: str):
    assert find_range_begin(place) == begin
    assert describe_range(begin) == name


def test_of_a_draft_that_is_right_early_only_every_range_has_its_own_passes():
    """Right up to the proposal after position 509, that is from place 511 on nothing is accepted."""
    length, prompt = 1100, 200
    ids = torch.arange(length)
    padded = torch.cat([ids, ids.new_full((5,), -9)])
    proposals = torch.stack([padded[row + 2 : row + 5] for row in range(length)])
    proposals[509:] = -7
    batch = TrainBatch({"input_ids": ids[None], "loss_mask": (ids >= prompt)[None]}, ("s",), length)
    [found] = replay(Scripted(proposals[None]), batch, 3)
    parts = found.walk_by_position
    assert list(parts) == [0, 256, 512, 1024]
    # Passes of four tokens begin at places 201, 205, …, 509; then one by one, the last one at 1099.
    assert [one.passes for one in parts.values()] == [14, 64, 511, 76]
    assert [one.accepted for one in parts.values()] == [14 * 3, 64 * 3, 0, 0]
    for name in ("passes", "accepted", "emitted"):
        assert sum(getattr(one, name) for one in parts.values()) == getattr(found.walk, name)
    joined = join_samples([{256: parts[256]}, parts])
    assert joined == {0: (parts[0],), 256: (parts[256],) * 2, 512: (parts[512],), 1024: (parts[1024],)}
