"""DFlash trains and proposes what the independent reader of its exports computes, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_reference import dflash_sums
from dflash_toys import MASKS, OPTIONS, SAMPLES, anchors_drawn, gradients, sample, side_by_side
from draft_toys import HIDDEN, VOCAB
from reference_readers import dflash_reader, propose_greedily

from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, DataError
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, seed: int = 3, **options) -> DFlashStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = DFlashStrategy(DFlashOptions(**OPTIONS | options), moved, None, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, weight in strategy.model.named_parameters():
                if "norm" in name:
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gamma": 2.0},
        {"loss": "specforge"},
        {"weighting": "dpace"},
        {"weighting": "dpace_cumulative_confidence", "loss": "specforge"},
        {"weighting": "dpace_continuation_value", "dpace_alpha": 0.2},
        {"sliding_window": 3},
        {"sliding_window": 2, "sliding_layers": [1], "attention": "eager"},
        {"sliding_window": 3, "sliding_window_kind": "anchor"},
        {"sliding_window": 3, "sliding_window_kind": "anchor_both_ways", "sliding_layers": [1]},
        {"objective_chunk_blocks": 1},
        {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 12},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_reader(make, options):
    strategy = make(**options)
    batch = strategy.collate(SAMPLES, ["a", "b", "c"])
    output = strategy.forward_loss(batch, StepContext(global_step=7, training=True))
    anchors = anchors_drawn(strategy, batch, step=7)
    expected = sum(dflash_sums(strategy, s, side_by_side(s), drawn).loss for s, drawn in zip(SAMPLES, anchors))
    assert [len(drawn) for drawn in anchors] == [5, 2, 5]
    torch.testing.assert_close(output.loss_sum, expected)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        assert gradient.abs().max() > 0, name


def test_attention_back_ends_agree(make):
    for window in (None, 3):
        outputs = {}
        for backend in ("eager", "sdpa", "flex"):
            strategy = make(attention=backend, sliding_window=window, dtype=torch.float32)
            batch = strategy.collate([sample(mask, s, torch.float32) for s, mask in enumerate(MASKS)], ["a", "b", "c"])
            with torch.no_grad():
                outputs[backend] = strategy.forward_loss(batch, StepContext(training=False))
        for backend in ("sdpa", "flex"):
            torch.testing.assert_close(outputs[backend].loss_sum, outputs["eager"].loss_sum, rtol=1e-5, atol=1e-5)


def test_a_long_batch_goes_through_attention_in_groups_with_the_same_result(make):
    long = [sample([0] * 9 + [1] * 150, 11), sample([0] * 90 + [1] * 20, 12)]
    sums = {}
    for backend in ("eager", "sdpa"):
        strategy = make(attention=backend, num_anchors=70, sliding_window=9, sliding_layers=[0])
        output = strategy.forward_loss(strategy.collate(long, ["a", "b"]), StepContext(training=True))
        sums[backend] = [output.loss_sum, *gradients(strategy, output.loss_sum).values()]
    for ours, plain in zip(sums["sdpa"], sums["eager"]):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
@pytest.mark.parametrize("weighting", ["uniform", "dpace"])
def test_sums_do_not_depend_on_batching_order_or_padding(make, loss, weighting):
    strategy = make(loss=loss, weighting=weighting, num_anchors=3)

    def run(*picked: int, extra: int = 0):
        chosen = [SAMPLES[i] for i in picked]
        names = ["abc"[i] for i in picked]
        if extra:
            chosen, names = [*chosen, sample([0] * extra, 9)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), StepContext(global_step=3, training=True))

    whole = run(2, 0, 1, extra=30)
    parts = [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    if not (loss == "specforge" and weighting == "dpace"):
        torch.testing.assert_close(whole.loss_weight, sum(part.loss_weight for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


def test_evaluation_looks_at_the_same_blocks_whatever_the_step_and_the_seed(make):
    strategy, other = make(num_anchors=2), make(num_anchors=2, seed=8)
    other.model.load_state_dict(strategy.model.state_dict())
    with torch.no_grad():
        outputs = [
            s.forward_loss(s.collate(SAMPLES, ["a", "b", "c"]), StepContext(global_step=step, training=False))
            for s, step in ((strategy, 0), (strategy, 5), (other, 5))
        ]
    assert outputs[0].loss_sum == outputs[1].loss_sum == outputs[2].loss_sum
    training = [
        strategy.forward_loss(strategy.collate(SAMPLES, list("abc")), StepContext(s, training=True)).loss_sum
        for s in (0, 5)
    ]
    assert training[0] != training[1]


def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make):
    strategy = make()
    output = strategy.forward_loss(strategy.collate([sample([0] * 6, 1)], ["a"]), StepContext(training=True))
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


def test_proposals_are_the_readers_first_choices(make):
    strategy = make(sliding_window=4, sliding_layers=[0])
    batch = strategy.collate(SAMPLES, ["a", "b", "c"])
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, 3), dflash_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], 3)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])


@pytest.mark.parametrize("kind", ["token", "anchor", "anchor_both_ways"])
def test_a_drafter_fed_in_pieces_proposes_what_the_replay_does(make, kind):
    strategy = make(sliding_window=5, sliding_window_kind=kind)
    one = sample([0] * 4 + [1] * 14, 21)
    batch = strategy.collate([one], ["a"])
    rows = torch.ones(1, 18, dtype=torch.bool)
    replayed = strategy.propose(batch, rows, 3)
    drafter, begin = strategy.drafter(), 0
    for end in (4, 5, 8, 9, 14):
        features = {tap: one[tap][begin:end] for tap in strategy.feature_names}
        drafter.extend(features, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(3, 0.0, None).tokens.tolist() == replayed[0, end - 1].tolist()
        begin = end


def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(make):
    strategy = make()
    one = SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in strategy.feature_names}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    logits = dflash_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities, (logits / 0.7).softmax(-1))
    assert (proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all()


def test_no_block_sees_its_own_answer(make):
    """Features and tokens from the anchor on must not matter, nor those of other blocks."""
    strategy = make()
    batch = strategy.collate(SAMPLES[:1], ["a"])
    rows = torch.zeros(1, 12, dtype=torch.bool)
    rows[0, [2, 6]] = True
    before = strategy.propose(batch, rows, 3)
    batch["features"][0, 7:] = 100.0
    batch["input_ids"][0, 8:] = 0
    assert torch.equal(strategy.propose(batch, rows, 3), before)


def test_a_draft_is_the_same_after_saving_and_loading(make, tmp_path):
    strategy, other = make(dtype=torch.float32), make(dtype=torch.float32, seed=99, attention="eager")
    save_draft(tmp_path, strategy, target_digest="t")
    load_draft(tmp_path, other, target_digest="t")
    assert all(
        torch.equal(a, b) for a, b in zip(strategy.model.state_dict().values(), other.model.state_dict().values())
    )


def test_bad_input_is_refused(make, parts, vocab):
    strategy = make()
    with pytest.raises(ConfigError, match="proposes 3 tokens, asked for 4"):
        strategy.propose(strategy.collate(SAMPLES, list("abc")), torch.ones(3, 12, dtype=torch.bool), 4)
    with pytest.raises(ConfigError, match="mask_token_id 40"):
        make(mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match="num_heads 3 is not a multiple"):
        make(num_heads=3)
    with pytest.raises(ConfigError, match="no vocabulary mapping"):
        DFlashStrategy(DFlashOptions(**OPTIONS), parts, vocab, 0)
    wrong = {**SAMPLES[0], "hf3": torch.zeros(5, HIDDEN)}
    with pytest.raises(DataError, match="sample a: feature hf3"):
        strategy.collate([wrong], ["a"])
    for bad in (
        {"sliding_layers": [0]},
        {"sliding_window": 4, "sliding_layers": [7]},
        {"sliding_window_kind": "anchor"},
        {"weighting": "dpace", "gamma": 1},
    ):
        with pytest.raises(ValueError, match=r"sliding_layers|sliding_window_kind|weighting"):
            DFlashOptions(**OPTIONS | bad)


def test_a_head_of_another_dtype_is_cast_once(make):
    model = make(torch.float32).model
    stored = model.own_target_head
    assert model.target_head is stored
    model.fc.bfloat16()
    cast = model.target_head
    assert cast.dtype == torch.bfloat16
    assert model.target_head is cast
    model.own_target_head = 2 * stored
    assert torch.equal(model.target_head, (2 * stored).bfloat16())
    model.fc.float()
    assert model.target_head is model.own_target_head
