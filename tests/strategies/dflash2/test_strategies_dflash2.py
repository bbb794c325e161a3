"""DFlash 2 begins as DFlash, trains, and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_reference import dflash2_sums
from dflash_toys import SAMPLES, anchors_drawn, gradients, sample, side_by_side
from draft_toys import HIDDEN, VOCAB
from reference_readers import dflash2_reader, propose_greedily
from torch import Tensor

from draftworks.config.strategies import TargetSizes
from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, StoreError
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.loss import score_candidates, teach_candidates
from draftworks.strategies.dflash2.model import BlockConvolution
from draftworks.strategies.dflash2.options import DFlash2Options, check_dflash2
from draftworks.strategies.dflash2.strategy import DFlash2Strategy

BLOCKS = {"block_size": 4, "num_layers": 2, "layer_ids": [1, 3, 6], "num_anchors": 5}
OPTIONS = {**BLOCKS, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
NAMES = ["a", "b", "c"]
STREAMS = ("hf1", "hf3", "hf6")
HERE = StepContext(global_step=5, total_steps=20, training=True)


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, seed: int = 3, **options) -> DFlash2Strategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = DFlash2Strategy(DFlash2Options(**OPTIONS | options), moved, None, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for weight in strategy.model.parameters():
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


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
    found, wanted = (one.forward_loss(batch, HERE) for one in (ours, theirs))
    sums = found.metric_sums
    base = sums["loss_sums"] - sums["selector_loss_sums"]
    torch.testing.assert_close(base, wanted.metric_sums["loss_sums"], rtol=1e-6, atol=0)
    assert torch.equal(sums["acc_corrects"], wanted.metric_sums["acc_corrects"])
    assert sums["accept_len_sums"] == sums["base_accept_len_sums"]


def half_easy(strategy: DFlash2Strategy) -> list[dict[str, Tensor]]:
    """The samples with answers of which the draft says a part: what it proposes itself after some of the tokens."""
    easy = []
    for one in SAMPLES:
        ids = one["input_ids"].clone()
        for anchor in range(3, len(ids) - 1, 4):
            after = slice(anchor + 1, anchor + strategy.options.block_size)
            known = (side_by_side(one)[:anchor], ids[1 : anchor + 1])
            ids[after] = torch.tensor(propose_greedily(dflash2_reader(strategy), *known, len(ids[after])))
        easy.append({**one, "input_ids": ids})
    return easy


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 2.0, "conv_kernel_size": 3},
        {"loss": "specforge", "selector_loss_alpha": 0.3},
        {"weighting": "dpace"},
        {"objective_chunk_blocks": 1, "sliding_window": 3, "selector_top_k": VOCAB},
    ],
    ids=str,
)
def test_loss_gradients_and_counts_are_those_of_the_reader(make, options):
    strategy = make(**options, num_anchors=12)
    samples = half_easy(strategy)
    batch = strategy.collate(samples, NAMES)
    output = strategy.forward_loss(batch, HERE)
    anchors = anchors_drawn(strategy, batch, HERE.global_step)
    expected = [dflash2_sums(strategy, one, side_by_side(one), drawn) for one, drawn in zip(samples, anchors)]
    loss = sum(one.loss for one in expected)
    torch.testing.assert_close(output.loss_sum, loss, rtol=1e-6, atol=1e-6)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, loss)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * float(gradient.norm()))
        assert gradient.any(), name
    for name in expected[0].by_place:
        torch.testing.assert_close(
            output.metric_sums[name], sum(one.by_place[name] for one in expected), rtol=1e-6, atol=0
        )
    for name in ("accept_len_sums", "base_accept_len_sums", "accept_len_denoms"):
        assert output.metric_sums[name] == sum(one.sums[name] for one in expected)
    assert output.metric_sums["accept_len_sums"] > output.metric_sums["base_accept_len_sums"] - 1


def test_a_label_that_is_no_candidate_is_never_right(make):
    """Though training puts it among them."""
    strategy = make(selector_top_k=1)
    sums = strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HERE).metric_sums
    assert torch.equal(sums["acc_corrects"], sums["recall_sums"])
    assert not sums["selector_loss_sums"].any()
    assert (sums["recall_sums"] < sums["acc_denoms"]).all()


def test_proposals_are_the_readers_first_choices_and_a_drafter_fed_in_pieces_makes_the_same(make):
    strategy = make(sliding_window=4, sliding_layers=[0])
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, 3), dflash2_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], 3)
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])
    drafter, begin = strategy.drafter(), 0
    for end in (1, 4, 10):
        drafter.extend(
            {tap: SAMPLES[0][tap][begin:end] for tap in STREAMS}, SAMPLES[0]["input_ids"][begin + 1 : end + 1]
        )
        assert drafter.propose(3, 0.0, None).tokens.tolist() == found[0, end - 1].tolist()
        begin = end


def test_a_sampled_proposal_has_the_readers_distribution_over_the_candidates_alone(make):
    strategy, one = make(), SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in STREAMS}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    logits = dflash2_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities, (logits / 0.7).softmax(-1))
    assert ((proposal.probabilities > 0).sum(-1) == OPTIONS["selector_top_k"]).all()


def test_a_draft_is_the_same_after_saving_and_nothing_to_start_from_for_one_that_computes_otherwise(make, tmp_path):
    strategy = make(dtype=torch.float32)
    save_draft(tmp_path, strategy, target_digest="t")
    other = make(dtype=torch.float32, seed=99, attention="eager", objective_chunk_blocks=2)
    load_draft(tmp_path, other, target_digest="t")
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    for structural in ({"selector_top_k": 7}, {"conv_kernel_size": 3}, {"conv_group_size": 8}, {"selector_rank": 4}):
        with pytest.raises(StoreError, match=next(iter(structural))):
            load_draft(tmp_path, make(dtype=torch.float32, **structural), target_digest="t", to_train=True)


def test_weights_in_bfloat16_beside_buffers_in_float32_give_nearly_the_same(make):
    """As sharding leaves them."""
    samples = [sample(one["loss_mask"].tolist(), seed, torch.float32) for seed, one in enumerate(SAMPLES)]
    wide, narrow = make(torch.float32), make(torch.float32)
    for weight in narrow.model.parameters():
        weight.data = weight.data.bfloat16()
    losses = [one.forward_loss(one.collate(samples, NAMES), HERE).loss_sum for one in (wide, narrow)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)
    losses[1].backward()
    assert all(weight.grad.isfinite().all() for weight in narrow.model.parameters())
    said = narrow.propose(narrow.collate(samples, NAMES), torch.ones(3, 12, dtype=torch.bool), 3)
    assert (said[:, :-1] >= 0).all()


def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make):
    strategy = make()
    output = strategy.forward_loss(strategy.collate([sample([0] * 6, 1)], ["a"]), HERE)
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_group_size": 5}, f"conv_group_size 5 does not divide the target's hidden_size {HIDDEN}"),
        ({"selector_top_k": VOCAB + 1}, f"selector_top_k {VOCAB + 1} is more than the {VOCAB} tokens"),
        ({"mask_token_id": VOCAB}, f"dflash2: mask_token_id {VOCAB}"),
    ],
)
def test_what_the_target_is_too_small_for_is_refused(options, message):
    sizes = TargetSizes(num_layers=8, hidden_size=HIDDEN, vocab_size=VOCAB, max_length=64)
    with pytest.raises(ConfigError, match=message):
        check_dflash2(DFlash2Options(**OPTIONS | options), sizes)


def test_a_kernel_longer_than_the_block_is_refused():
    with pytest.raises(ValueError, match="conv_kernel_size 5 is more than block_size 4"):
        DFlash2Options(**BLOCKS, conv_kernel_size=5)
