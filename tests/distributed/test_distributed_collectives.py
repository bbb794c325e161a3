"""Sums and largest values of all ranks: on one rank they are those of the rank, in the same types as on several."""

from __future__ import annotations

import pytest
import torch

from draftworks.distributed.collectives import gather_from_ranks, max_over_ranks, sum_over_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_sums_are_taken_in_float64_so_that_they_do_not_depend_on_the_ranks(dtype: torch.dtype):
    values = torch.tensor([[1, 2], [3, 4]]).to(dtype)
    total = sum_over_ranks(values)
    assert total.dtype == torch.float64
    assert total.tolist() == [[1, 2], [3, 4]]


def test_a_sum_leaves_what_is_summed_as_it_was():
    values = torch.ones(3, dtype=torch.float64)
    sum_over_ranks(values).add_(1)
    assert values.tolist() == [1, 1, 1]


def test_without_a_process_group_one_rank_stands_for_all():
    assert max_over_ranks(3) == 3
    assert gather_from_ranks({"a": 1}) == [{"a": 1}]
