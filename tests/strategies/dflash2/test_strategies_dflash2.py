"""DFlash 2 begins as DFlash, trains, and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from functools import partial

import pytest
import strategy_cases
import torch
from dflash_toys import OPTIONS as BLOCKS
from dflash_toys import SAMPLES
from strategy_cases import HALFWAY, NAMES

from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.model import BlockConvolution, score_candidates, teach_candidates
from draftworks.strategies.dflash2.options import DFlash2Options
from draftworks.strategies.dflash2.strategy import DFlash2Strategy

OPTIONS = {**BLOCKS, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
make = partial(strategy_cases.make, "dflash2")


def test_a_convolution_is_its_formula_in_numbers():
    """One group of two channels, blocks of three places, worked out by hand."""
    convolution = BlockConvolution(hidden=2, block_size=3, taps=2, group_size=2)
    with torch.no_grad():
        convolution.base_kernel.copy_(torch.tensor([[[1.0, 2.0], [0.5, 0.0]], [[1.0, 1.0], [0.0, 3.0]]]))
        # delta_p: side 0, tap 0 is x_p's first channel; side 1, tap 1 is its second.
        convolution.kernel_projection.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    entering = torch.tensor([[2.0, 6.0], [12.5, 20.0], [31.5, 42.0]])  # (base_0 + x_p[0])·x_p + base_1·x_{p-1}
    leaving = torch.tensor(
        [[20.0, 60.0], [205.0, 620.0], [1065.0, 2220.0]]
    )  # v_p + (base_1 + x_p[1])·v_{p-1}, v = 10·entering
    two_blocks = torch.cat([x, x])[None]
    found = convolution(two_blocks, lambda read: 10 * read)
    torch.testing.assert_close(convolution(x[None], lambda read: torch.zeros_like(read)), torch.zeros(1, 3, 2))
    assert torch.equal(10 * entering[0], leaving[0])
    torch.testing.assert_close(found[0, :3], leaving)
    torch.testing.assert_close(found[0, 3:], leaving)


def test_scores_and_taught_candidates_in_numbers():
    successors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    scores = score_candidates(
        torch.tensor([[5.0, 4.0]]), torch.tensor([[0.5, -1.0]]), successors, torch.tensor([[2, 0]])
    )
    assert scores.tolist() == [[5.0 - 1.0, 4.0 + 0.5]]
    taught = teach_candidates(torch.tensor([[7, 3, 1], [7, 3, 1]]), torch.tensor([3, 9]))
    assert taught.ids.tolist() == [[7, 3, 1], [7, 3, 9]]
    assert taught.label_at.tolist() == [1, 2]
    assert taught.is_served.tolist() == [True, False]


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_an_untrained_draft_is_dflash(parts, sliding_window):
    """The same weights where both have them, the same loss, the same proposals."""
    ours, theirs = (
        kind(options, parts, None, seed=3)
        for kind, options in (
            (DFlash2Strategy, DFlash2Options(**OPTIONS, sliding_window=sliding_window)),
            (DFlashStrategy, DFlashOptions(**BLOCKS, sliding_window=sliding_window)),
        )
    )
    shared = theirs.model.state_dict()
    assert all(torch.equal(ours.backbone.state_dict()[name], weight) for name, weight in shared.items())
    narrow = [{key: v.float() if v.is_floating_point() else v for key, v in one.items()} for one in SAMPLES]
    batch, rows = ours.collate(narrow, NAMES), torch.ones(3, 12, dtype=torch.bool)
    assert torch.equal(ours.propose(batch, rows, 3), theirs.propose(batch, rows, 3))
    found, wanted = (one.forward_loss(batch, HALFWAY) for one in (ours, theirs))
    sums = found.metric_sums
    base = sums["loss_sums"] - sums["selector_loss_sums"]
    torch.testing.assert_close(base, wanted.metric_sums["loss_sums"], rtol=1e-6, atol=0)
    assert torch.equal(sums["acc_corrects"], wanted.metric_sums["acc_corrects"])
    assert sums["accept_len_sums"] == sums["base_accept_len_sums"]


def test_a_label_that_is_no_candidate_is_never_right():
    """Though training puts it among them."""
    strategy = make(selector_top_k=1)
    sums = strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HALFWAY).metric_sums
    assert torch.equal(sums["acc_corrects"], sums["recall_sums"])
    assert not sums["selector_loss_sums"].any()
    assert (sums["recall_sums"] < sums["acc_denoms"]).all()
