"""XPress trains and proposes what the independent reader of its exports computes; passes after each other, as it is served."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_reference import xpress_sums
from dflash_toys import MASKS, OPTIONS, anchors_drawn, gradients, one_label, sample, side_by_side
from reference_readers import xpress_reader
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.xpress.loss import xpress_losses
from draftworks.strategies.xpress.model import Refiner
from draftworks.strategies.xpress.options import XPressOptions
from draftworks.strategies.xpress.strategy import XPressStrategy

NAMES = ["a", "b", "c"]
STREAMS = ("hf1", "hf3", "hf6", "last")
HERE = StepContext(global_step=7, training=True)
SAMPLES = [sample(mask, seed, taps=STREAMS) for seed, mask in enumerate(MASKS)]


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, **options) -> XPressStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = XPressStrategy(XPressOptions(**OPTIONS | {"refiner_rank": 5} | options), moved, None, seed=3)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for name, weight in strategy.model.named_parameters():
                if "norm" in name or not weight.any():
                    weight.add_(0.5 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gamma": 2.0, "ce_weight": 1.0, "consistency_passes": 1, "objective_chunk_blocks": 2},
        {"weighting": "dpace", "base_weight": 0.0, "sliding_window": 3},
        {"consistency_weight": 0.0, "num_anchors": 12},
    ],
    ids=str,
)
def test_loss_gradients_and_metric_sums_are_those_of_the_reader(make, options):
    strategy = make(**options)
    batch = strategy.collate(SAMPLES, NAMES)
    output = strategy.forward_loss(batch, HERE)
    anchors = anchors_drawn(strategy, batch, HERE.global_step)
    expected = [xpress_sums(strategy, one, side_by_side(one), drawn) for one, drawn in zip(SAMPLES, anchors)]
    loss = sum(one.loss for one in expected)
    torch.testing.assert_close(output.loss_sum, loss)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, loss)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
        assert gradient.any(), name
    sums = dict(output.metric_sums)
    for name in ("accept_len", "base_accept_len", "tau"):
        assert sums.pop(f"{name}_sums").item() == pytest.approx(sum(one.sums[name] for one in expected))
        assert sums.pop(f"{name}_denoms").item() == sum(one.sums["blocks"] for one in expected)
    by_place = {name: sum(one.by_place[name] for one in expected) for name in expected[0].by_place}
    by_place |= dict.fromkeys(("loss_denoms", "acceptance_denoms"), by_place["acc_denoms"])
    torch.testing.assert_close(sums, by_place)


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
    settings = LossSettings(HERE, XPressOptions(consistency_passes=1))
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
    refined, plain = (one.forward_loss(batch, HERE) for one, batch in zip((xpress, dflash), batches))
    torch.testing.assert_close(refined.loss_sum, (1 + 0.3 + 0.6) * plain.loss_sum)
    assert refined.loss_weight == plain.loss_weight


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_proposals_are_those_of_the_reader_after_as_many_passes(make, passes):
    strategy = make(jacobi_passes=passes, block_size=6)
    one = sample([1] * 14, 5, taps=STREAMS)
    batch, reader = strategy.collate([one], ["a"]), xpress_reader(strategy)
    found = strategy.propose(batch, torch.ones(1, 14, dtype=torch.bool), 5)[0]
    drafter = strategy.drafter()
    for row in range(13):
        seen = (side_by_side(one)[: row + 1], one["input_ids"][1 : row + 2])
        assert found[row].tolist() == reader.logits(*seen, torch.zeros(5)).argmax(-1).tolist()
        drafter.extend({tap: one[tap][row : row + 1] for tap in STREAMS}, one["input_ids"][row + 1 : row + 2])
        assert drafter.propose(5, 0.0, None).tokens.tolist() == found[row].tolist()
        assert drafter.propose(2, 0.0, None).tokens.tolist() == found[row, :2].tolist()


def one_after_another(strategy: XPressStrategy, one: dict[str, Tensor], row: int, count: int) -> list[int]:
    """What is decoded if every token is chosen after those before it are."""
    reader, next_tokens = xpress_reader(strategy), one["input_ids"][1 : row + 2]
    rows, said = reader.backbone.rows(side_by_side(one)[: row + 1], next_tokens), torch.zeros(count, dtype=torch.int64)
    for place in range(count):
        said[place] = reader.refine(rows, int(next_tokens[-1]), said)[place].argmax()
    return said.tolist()


def test_as_many_first_tokens_as_passes_are_those_of_decoding_one_after_another(make):
    one, moved = sample([1] * 14, 5, taps=STREAMS), 0
    for passes in (1, 3, 5):
        strategy = make(jacobi_passes=passes, block_size=6)
        found = strategy.propose(strategy.collate([one], ["a"]), torch.ones(1, 14, dtype=torch.bool), 5)[0, :13]
        decoded = [one_after_another(strategy, one, row, 5) for row in range(13)]
        assert [tokens[:passes] for tokens in decoded] == found[:, :passes].tolist()
        moved += decoded != found.tolist()
    assert moved > 0


def test_sums_do_not_depend_on_batching_order_or_padding(make):
    strategy = make(num_anchors=3)

    def run(*picked: int):
        return strategy.forward_loss(strategy.collate([SAMPLES[i] for i in picked], [NAMES[i] for i in picked]), HERE)

    whole, parts = run(2, 0, 1), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make):
    strategy = make()
    nothing = sample([0] * 6, 1, taps=STREAMS)
    output = strategy.forward_loss(strategy.collate([nothing], ["a"]), HERE)
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


def test_weights_in_bfloat16_beside_buffers_in_float32_give_nearly_the_same(make):
    """As sharding leaves them."""
    samples = [sample(mask, seed, torch.float32, STREAMS) for seed, mask in enumerate(MASKS)]
    wide, narrow = make(torch.float32), make(torch.float32)
    for weight in narrow.model.parameters():
        weight.data = weight.data.bfloat16()
    losses = [one.forward_loss(one.collate(samples, NAMES), HERE).loss_sum for one in (wide, narrow)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)
    losses[1].backward()
    assert all(weight.grad.isfinite().all() for weight in narrow.model.parameters())


@pytest.mark.parametrize("bad", [{"ce_weight": 0, "tv_weight": 0}, {"jacobi_passes": 0}, {"refiner_rank": 0}])
def test_options_that_do_not_go_together_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        XPressOptions(**bad)


def test_more_proposals_than_a_block_has_are_refused(make):
    strategy = make()
    with pytest.raises(ConfigError, match="xpress: the draft proposes 3 tokens, asked for 4"):
        strategy.propose(strategy.collate(SAMPLES, NAMES), torch.ones(3, 12, dtype=torch.bool), 4)
