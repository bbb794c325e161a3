"""Anchors: drawn by content, evenly, whatever surrounds a sample."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from draftworks.drafts.anchors import derive_sample_seed, draw_blocks, gather_labels, make_label_mask, place_blocks

SEED = torch.tensor([derive_sample_seed(42, "sample")])


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    count=st.integers(1, 12),
    step=st.integers(0, 10**6),
    padding=st.integers(0, 9),
)
def test_a_sample_draws_the_same_distinct_candidates_in_order_whatever_is_around_it(mask, count, step, padding):
    alone = torch.tensor([mask])
    neighbours = torch.ones(2, len(mask) + padding, dtype=torch.bool)
    neighbours[1] = F.pad(alone[0], (0, padding))
    one = draw_blocks(alone, SEED, step, count, 4)
    beside = draw_blocks(neighbours, torch.cat([SEED + 1, SEED]), step, count, 4)
    drawn = one.anchors[0][one.live[0]].tolist()
    assert drawn == beside.anchors[1][beside.live[1]].tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(count, sum(mask))
    assert all(mask[position] for position in drawn)


def test_every_candidate_is_drawn_equally_often():
    candidates = torch.ones(1, 20, dtype=torch.bool)
    seen = torch.zeros(20)
    for step in range(2000):
        seen[draw_blocks(candidates, SEED, step, 5, 4).anchors[0]] += 1
    expected = 2000 * 5 / 20
    assert ((seen - expected).abs() < 5 * expected**0.5).all()


def test_samples_of_one_batch_draw_differently():
    seeds = torch.tensor([derive_sample_seed(42, f"sample {i}") for i in range(50)])
    drawn = draw_blocks(torch.ones(50, 64, dtype=torch.bool), seeds, 0, 8, 4).anchors
    assert len({tuple(row) for row in drawn.tolist()}) == 50


def test_a_batch_without_candidates_has_one_dead_block_each():
    blocks = draw_blocks(torch.zeros(3, 7, dtype=torch.bool), SEED.repeat(3), 0, 5, 4)
    assert blocks.anchors.tolist() == [[0], [0], [0]]
    assert not blocks.live.any()


def test_all_blocks_are_at_all_candidates():
    candidates = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 1, 0]], dtype=torch.bool)
    blocks = place_blocks(candidates, 3)
    assert [row[on].tolist() for row, on in zip(blocks.anchors, blocks.live)] == [[1, 2, 4], [3]]
    assert blocks.positions[0].tolist() == [1, 2, 3, 2, 3, 4, 4, 5, 6]


def test_labels_end_with_the_sample_and_where_asked_with_the_answer():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    blocks = place_blocks(torch.tensor([[0, 1, 0, 0, 1, 0]], dtype=torch.bool), 5)
    assert gather_labels(blocks, ids).tolist() == [[[12, 13, 14, 15], [15, 0, 0, 0]]]
    assert make_label_mask(blocks, mask, contiguous=False).tolist() == [
        [[True, False, True, True], [True, False, False, False]]
    ]
    assert make_label_mask(blocks, mask, contiguous=True).tolist() == [
        [[True, False, False, False], [True, False, False, False]]
    ]


def test_another_seed_and_another_sample_draw_other_anchors():
    """Else trainings with two seeds would say less of chance than they seem to."""
    seeds = {derive_sample_seed(seed, sample) for seed in range(20) for sample in ("a", "b", "ab")}
    assert len(seeds) == 60
    assert derive_sample_seed(42, "a") == derive_sample_seed(42, "a")
    assert all(0 <= seed < 2**63 for seed in seeds)
    candidates = torch.ones(1, 400, dtype=torch.bool)
    drawn = [
        draw_blocks(candidates, torch.tensor([derive_sample_seed(seed, "a")]), step=0, count=20, size=4).anchors
        for seed in (1, 2)
    ]
    assert not torch.equal(*drawn)
