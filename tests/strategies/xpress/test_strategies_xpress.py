"""XPress trains and proposes what the independent reader of its exports computes; passes after each other, as it is served."""

from __future__ import annotations

from functools import partial

import pytest
import strategy_cases
import torch
from dflash_toys import MASKS, OPTIONS, one_label, sample, side_by_side
from strategy_cases import HALFWAY, NAMES
from torch import Tensor
from torch.nn import functional as F
from xpress_cases import read

from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.xpress.model import Refiner, xpress_losses
from draftworks.strategies.xpress.options import XPressOptions
from draftworks.strategies.xpress.strategy import XPressStrategy

STREAMS = ("hf1", "hf3", "hf6", "last")
make = partial(strategy_cases.make, "xpress", moved=0.5)


def test_the_refiner_of_two_places_and_one_number_computes_what_one_does_by_hand():
    """H = 1, r = 1, all weights 1 but for mix_l: states 2 and 4, embeddings e(0) = 1 and e(1) = 3."""
    refiner = Refiner(1, 2, XPressOptions(refiner_rank=1, mlp_ratio=1, block_size=3), torch.Generator())
    with torch.no_grad():
        for weight in refiner.parameters():
            weight.fill_(1.0)
        refiner.token_embed.weight.copy_(torch.tensor([[1.0], [3.0]]))
        refiner.mix_l.copy_(torch.tensor([[[9.0, 9.0, 9.0], [0.5, 0.25, 9.0], [1.0, 2.0, -1.0]]]))
        read = refiner.read_states(torch.tensor([[[2.0], [4.0], [3.0]]]))
        found = refiner.forward_block(read, torch.tensor([0]), torch.tensor([[1, 0]]))
    # Inputs: state + mean + token before, of which the first two are the anchor's, token 0.
    x = [2 + 3 + 1, 4 + 3 + 1, 3 + 3 + 3]
    mixed = torch.tensor([x[1] + 0.5 * x[0] + 0.25 * x[1], x[2] + x[0] + 2 * x[1] - x[2]])
    torch.testing.assert_close(found[0, :, 0], mixed + F.silu(mixed) * mixed)


def test_the_loss_of_one_label_is_the_formulas_in_figures():
    """Two tokens, logits (0, ln 3) before and (0, 0) after refinement; the target says the first with certainty."""
    ln3 = torch.tensor(3.0).log()
    head = torch.tensor([[0.0], [1.0]])
    blocks = one_label(ln3[None, None], torch.tensor([[-100.0]]))
    settings = LossSettings(HALFWAY, XPressOptions(consistency_passes=1))
    found = xpress_losses(blocks, torch.tensor([[[-1.0]] * 2]) * ln3, head, head, settings)
    ln2 = torch.tensor(2.0).log()
    refined, base = 0.1 * ln2 + 0.9 * 0.5, 0.1 * 2 * ln2 + 0.9 * 0.75
    torch.testing.assert_close(found.loss, 1.3 * refined + 0.6 * base)
    assert found.sums["tau_sums"].item() == pytest.approx(0.5)
    assert (found.sums["accept_len_sums"].item(), found.sums["base_accept_len_sums"].item()) == (1, 0)


def test_an_untrained_draft_is_dflash(parts):
    """It has its weights, its proposals, and as the loss of every pass its own."""
    xpress = XPressStrategy(XPressOptions(**OPTIONS, refiner_rank=5, ce_weight=1.0, tv_weight=0.0), parts, None, seed=3)
    dflash = DFlashStrategy(DFlashOptions(**OPTIONS), parts, None, seed=3)
    samples = [sample(mask, seed, torch.float32, STREAMS) for seed, mask in enumerate(MASKS)]
    batches = [strategy.collate(samples, NAMES) for strategy in (xpress, dflash)]
    rows = torch.ones(batches[0]["input_ids"].shape, dtype=torch.bool)
    rows[:, -1] = False
    assert torch.equal(xpress.propose(batches[0], rows, 3), dflash.propose(batches[1], rows, 3))
    refined, plain = (one.forward_loss(batch, HALFWAY) for one, batch in zip((xpress, dflash), batches))
    torch.testing.assert_close(refined.loss_sum, (1 + 0.3 + 0.6) * plain.loss_sum)
    assert refined.loss_weight == plain.loss_weight


def one_after_another(strategy: XPressStrategy, one: dict[str, Tensor], row: int, count: int) -> list[int]:
    """What is decoded if every token is chosen after those before it are."""
    reader, next_tokens = read(strategy), one["input_ids"][1 : row + 2]
    rows, said = reader.backbone.rows(side_by_side(one)[: row + 1], next_tokens), torch.zeros(count, dtype=torch.int64)
    for place in range(count):
        said[place] = reader.refine(rows, int(next_tokens[-1]), said)[place].argmax()
    return said.tolist()


def test_as_many_first_tokens_as_passes_are_those_of_decoding_one_after_another():
    one, moved = sample([1] * 14, 5, taps=STREAMS), 0
    for passes in (1, 3, 5):
        strategy = make(jacobi_passes=passes, block_size=6)
        found = strategy.propose(strategy.collate([one], ["a"]), torch.ones(1, 14, dtype=torch.bool), 5)[0, :13]
        decoded = [one_after_another(strategy, one, row, 5) for row in range(13)]
        assert [tokens[:passes] for tokens in decoded] == found[:, :passes].tolist()
        moved += decoded != found.tolist()
    assert moved > 0
