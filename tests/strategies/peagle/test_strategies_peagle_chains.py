"""Chains are drawn by content: as many as the formula says, each only where it has been one depth before, and evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.documents import Documents
from draftworks.drafts.objectives import specforge_label_mask, token_mean_label_mask
from draftworks.strategies.peagle.chains import Chains, DepthSampling, TokensByDepth, draw_chains, keep_all_chains

SEED = torch.tensor([derive_sample_seed(42, "sample")])
DEPTHS = 5
GATES = {"token_mean": token_mean_label_mask, "specforge": specforge_label_mask}
masks = st.lists(st.booleans(), min_size=1, max_size=40)
samplings = st.builds(DepthSampling, st.floats(0.1, 1.0), st.floats(0.0, 1.0))
both_modes = pytest.mark.parametrize("mode", GATES)


def drawn(mask: list[bool], mode: str, sampling: DepthSampling, step: int = 0) -> Tensor:
    """(D, S) of one sample."""
    documents = Documents.from_lengths((len(mask),))
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS, documents)
    return draw_chains(label_mask, SEED, step, sampling, documents)[:, 0]


@both_modes
@given(mask=masks, sampling=samplings, step=st.integers(0, 10**6))
def test_every_depth_keeps_as_many_as_the_formula_says_of_those_before_it(mode, mask, sampling, step):
    """speculators: int((valid - d) · max(r ** d, r_min)) of the candidates, all where these are fewer."""
    kept = drawn(mask, mode, sampling, step)
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS)[:, 0]
    assert torch.equal(kept[0], label_mask[0])
    valid, before = int(label_mask[0].sum()), torch.ones(len(mask), dtype=torch.bool)
    for depth in range(1, DEPTHS):
        candidates = before & label_mask[depth]
        assert not (kept[depth] & ~candidates).any()
        quota = int(max(0, valid - depth) * max(sampling.ratio**depth, sampling.least))
        assert kept[depth].sum() == min(quota, int(candidates.sum()))
        before = kept[depth]


@given(mask=masks)
def test_a_ratio_of_one_keeps_every_chain_that_counts(mask):
    kept = drawn(mask, "token_mean", DepthSampling(1.0, 0.2))
    assert torch.equal(kept, token_mean_label_mask(torch.tensor([mask]), DEPTHS)[:, 0])


@both_modes
@given(mask=masks, padding=st.integers(0, 9), before=st.integers(0, 7), sampling=samplings)
def test_a_sample_draws_the_same_whatever_is_around_it(mode, mask, padding, before, sampling):
    alone, length = drawn(mask, mode, sampling, step=3), len(mask)
    padded = torch.ones(2, length + padding, dtype=torch.bool)
    padded[1] = F.pad(torch.tensor(mask), (0, padding))
    seeds = torch.cat([SEED + 1, SEED])
    one_each = Documents.from_lengths((length + padding,))
    label_mask = GATES[mode](padded, DEPTHS, one_each)
    beside = draw_chains(label_mask, seeds, 3, sampling, one_each)[:, 1]
    assert torch.equal(beside[:, :length], alone)
    packed = Documents.from_lengths((before + 1, length))
    label_mask = GATES[mode](torch.tensor([[True] * (before + 1) + mask]), DEPTHS, packed)
    behind = draw_chains(label_mask, seeds, 3, sampling, packed)[:, 0]
    assert torch.equal(behind[:, before + 1 :], alone)


def test_every_chain_is_kept_equally_often():
    steps, length = 1000, 22
    seen = torch.zeros(DEPTHS, length)
    for step in range(steps):
        seen += drawn([True] * length, "token_mean", DepthSampling(0.6, 0.1), step)
    for depth in range(1, DEPTHS):
        possible = seen[depth, : length - 2 - depth]
        expected = steps * int((20 - depth) * 0.6**depth) / 20
        assert not seen[depth, length - 2 - depth :].any()
        assert ((possible - possible.mean()).abs() < 6 * expected**0.5).all()


@both_modes
def test_all_chains_go_on_until_a_row_that_does_not_count(mode):
    mask = [False, True, True, True, False, True, True, True, True, False]
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS)
    kept = keep_all_chains(label_mask)[:, 0]
    assert torch.equal(kept[0], label_mask[0, 0])
    for row in range(len(mask)):
        counted = label_mask[1:, 0, row].tolist()
        expected = counted.index(False) if False in counted else DEPTHS - 1
        assert kept[1:, row].tolist() == [depth < expected for depth in range(DEPTHS - 1)]


def test_masked_places_are_listed_chain_by_chain_and_found_again_by_depth():
    documents = Documents.from_lengths((4, 3))
    kept = torch.zeros(4, 2, 7, dtype=torch.bool)
    kept[0, :, :] = torch.tensor([1, 0, 1, 0, 1, 0, 0])
    kept[1, 0, [1, 5]] = kept[2, 0, 1] = kept[1, 1, 4] = kept[2, 1, 4] = kept[3, 1, 4] = True
    chains = Chains.of(kept, documents)
    assert chains.anchors.tolist() == [1, 1, 5, 11, 11, 11]
    assert chains.depths.tolist() == [1, 2, 1, 1, 2, 3]
    assert chains.positions.tolist() == [2, 3, 2, 1, 2, 3]
    assert chains.begins.tolist() == [0, 0, 4, 11, 11, 11]
    assert [(at.start, at.stop) for at in chains.make_seen_keys().split_tokens(100)] == [(0, 2), (2, 3), (3, 6)]
    by_depth = TokensByDepth.where(kept, chains)
    first, *deeper = by_depth.index.split(by_depth.sizes)
    assert first.tolist() == [0, 2, 4, 7, 9, 11]
    for depth, rows in enumerate(deeper, start=1):
        assert chains.anchors[rows - 14].tolist() == kept[depth].flatten().nonzero()[:, 0].tolist()
        assert all(one < other for one, other in pairwise(rows.tolist()))
