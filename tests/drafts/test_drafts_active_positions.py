from __future__ import annotations

import pytest
import torch

from draftworks.drafts.documents import ActivePositions, Documents

MASKS = [[[0, 1, 1], [1, 0, 1]], [[1, 1, 1], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize("mask", MASKS)
def test_spread_puts_rows_back_where_take_found_them(mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    active = ActivePositions.where(mask)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(active.gather(x), x[mask])
    assert torch.equal(active.scatter(active.gather(x)), x * mask[..., None])
    torch.autograd.gradcheck(active.gather, x)
    torch.autograd.gradcheck(active.scatter, x[mask].detach().requires_grad_())


def test_renumber_gives_places_and_keeps_minus_one():
    active = ActivePositions.where(torch.tensor([[False, True, True], [True, False, True]]))
    assert active.renumber(torch.tensor([[5, 1, -1], [2, 3, 1]])).tolist() == [[3, 0, -1], [1, 2, 0]]


@pytest.mark.parametrize("distance", [0, 1, 7])
@pytest.mark.parametrize("mask", [[[0, 1, 1, 0, 1], [1, 0, 1, 0, 1]], [[1] * 5] * 2])
def test_rows_taken_ahead_are_those_so_many_positions_after(mask, distance):
    mask, values = torch.tensor(mask, dtype=torch.bool), torch.arange(10).view(2, 5, 1)
    taken = ActivePositions.where(mask).shift(distance, Documents.from_lengths((2, 3))).gather(values)
    last = [1, 1, 4, 4, 4]
    expected = [5 * row + min(place + distance, last[place]) for row, place in mask.nonzero().tolist()]
    assert taken.flatten().tolist() == expected


def test_looking_ahead_ends_with_the_document_that_a_row_is_in():
    documents = Documents.from_lengths((2, 3))
    active = ActivePositions.where(torch.tensor([[True, True, False, True, False], [False, True, True, False, True]]))
    assert active.shift(0, documents).index.tolist() == active.index.tolist() == [0, 1, 3, 6, 7, 9]
    assert active.shift(1, documents).index.tolist() == [1, 1, 4, 6, 8, 9]
    assert active.shift(7, documents).index.tolist() == [1, 1, 4, 6, 9, 9]
