from __future__ import annotations

from itertools import product

import pytest
import torch
from coverings import gate_or_long, pairwise
from eagle3_reference import MASKS, TOLERANCE, assert_close, assert_trains_as_read, gradients, reference, run

from draftworks.drafts.strategy import StepContext
from draftworks.evaluation.evaluator import Evaluator

KEYS = {
    "fc.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
}
AXES = [torch.float32, torch.float64], [1, 4, 14], ["token_mean", "specforge"]
"""Dtypes, lengths of a chain, losses."""


@pytest.mark.parametrize(("dtype", "ttt_length", "loss"), gate_or_long(product(*AXES), pairwise(*AXES)))
def test_both_modes_train_what_the_reader_of_exports_computes(make_strategy, make_sample, dtype, ttt_length, loss):
    strategy = make_strategy(dtype, ttt_length=ttt_length, loss=loss)
    assert_trains_as_read(strategy, [make_sample(mask, seed, dtype) for seed, mask in enumerate(MASKS)])


def test_attention_back_ends_give_the_same_draft_and_are_no_part_of_it(make_strategy, make_sample):
    samples = [make_sample(mask, seed, torch.float64) for seed, mask in enumerate(MASKS)]
    made = {name: make_strategy(torch.float64, attention=name) for name in ("eager", "auto", "sdpa", "flex")}
    sums = {}
    for name in ("eager", "auto", "sdpa"):
        output = run(made[name], samples)
        sums[name] = {"loss": output.loss_sum, **gradients(made[name], output.loss_sum)}
    for name, expected in sums["eager"].items():
        assert_close(sums["auto"][name], expected, 1e-10, name)
        assert_close(sums["sdpa"][name], expected, 1e-10, name)
    with torch.no_grad():
        assert_close(run(made["flex"], samples, training=False).loss_sum, sums["eager"]["loss"].detach(), 1e-10)
    assert len({str(strategy.config()) for strategy in made.values()}) == 1


def test_loss_per_step_is_over_supervised_rows_or_all_positions(make_strategy, make_sample):
    samples = [make_sample(mask, seed) for seed, mask in enumerate(MASKS)]
    by_token, by_position = (run(make_strategy(loss=loss), samples).metric_sums for loss in ("token_mean", "specforge"))
    assert by_token["loss_denoms"].tolist() == by_token["acc_denoms"].tolist()
    assert by_position["loss_denoms"].tolist() == [3 * 12] * 4


def test_specforge_mode_masks_the_last_token_of_every_sample(make_strategy, make_sample):
    strategy = make_strategy(loss="specforge")
    batch = strategy.collate([make_sample([0, 1, 1]), make_sample([1, 1, 1, 1, 1])], ["a", "b"])
    assert batch["loss_mask"].int().tolist() == [[0, 1, 0, 0, 0], [1, 1, 1, 1, 0]]


def test_checkpoint_holds_exactly_the_canonical_tensors(make_strategy, parts, vocab):
    model = make_strategy().model
    assert set(model.state_dict()) == KEYS
    assert model.fc.weight.shape == (parts.hidden_size, 3 * parts.hidden_size)
    assert model.midlayer.self_attn.q_proj.weight.shape[1] == 2 * parts.hidden_size
    assert torch.equal(model.d2t, torch.as_tensor(vocab.d2t))
    assert torch.equal(model.t2d, torch.as_tensor(vocab.t2d))
    assert torch.equal(model.lm_head.weight, parts.head[torch.as_tensor(vocab.t2d)])
    assert {name for name, _ in model.named_parameters()} == KEYS - {"d2t", "t2d"}


def test_labels_outside_the_draft_vocabulary_cost_nothing_and_count_as_wrong(make_strategy, make_sample, parts, vocab):
    strategy = make_strategy()
    sample = make_sample([1] * 8)
    outside = parts.head[torch.as_tensor(~vocab.t2d)]
    labels = (outside @ parts.head.T).argmax(-1)
    sample["last"] = outside[~torch.as_tensor(vocab.t2d)[labels]][:8]
    output = run(strategy, [sample])
    assert output.loss_sum.item() == 0
    assert float(output.loss_weight) == 6
    assert output.metric_sums["acc_denoms"].tolist() == [6, 5, 4, 3]
    assert not output.metric_sums["acc_corrects"].any()
    assert all(not grad.any() for grad in gradients(strategy, output.loss_sum).values())


def test_no_grad_gives_the_same_numbers(make_strategy, make_sample):
    strategy, samples = make_strategy(), [make_sample(mask, seed) for seed, mask in enumerate(MASKS)]
    with_grad = run(strategy, samples)
    with torch.no_grad():
        without = run(strategy, samples)
    assert with_grad.metric_sums.keys() == without.metric_sums.keys()
    assert torch.equal(with_grad.loss_sum.detach(), without.loss_sum)
    assert all(torch.equal(with_grad.metric_sums[name], without.metric_sums[name]) for name in with_grad.metric_sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_acceptance_rate_is_that_of_the_readers_logits(make_strategy, make_sample, dtype, loss):
    strategy = make_strategy(dtype, loss=loss)
    samples = [make_sample(mask, seed, dtype) for seed, mask in enumerate(MASKS)]
    with torch.no_grad():
        counts, expected = run(strategy, samples, training=False).metric_sums, reference(strategy, samples)
    taught = [[float(each.accepted) for each in step if each.taught] for step in expected.supervised]
    assert_close(counts["acceptance_sums"], [sum(step) for step in taught], TOLERANCE[dtype])
    assert counts["acceptance_denoms"].tolist() == [len(step) for step in taught]
    assert 0 < len(taught[0]) < counts["acc_denoms"][0]
    everywhere = [sum(float(each.accepted) for each in step) for step in expected.supervised]
    assert_close(counts["unconditional_acceptance_sums"], everywhere, TOLERANCE[dtype])
    assert counts["unconditional_acceptance_denoms"].tolist() == expected.denoms == counts["acc_denoms"].tolist()
    assert (counts["unconditional_acceptance_sums"] > counts["acceptance_sums"]).all()


@pytest.mark.parametrize(
    "options", [{}, {"objective": "lk_alpha"}, {"objective": "lk_lambda", "kl_scale": 0.7}], ids=str
)
def test_an_evaluation_in_specforges_mode_weighs_batches_by_their_positions(make_strategy, make_sample, options):
    strategy = make_strategy(torch.float64, loss="specforge", **options)
    samples = [make_sample(mask, seed, torch.float64) for seed, mask in enumerate(MASKS)]
    cuts, names = [samples[:2], samples[2:]], [["a", "b"], ["c"]]
    result = Evaluator().run(strategy, [strategy.collate(*cut) for cut in zip(cuts, names)])
    positions = [2 * len(MASKS[0]), len(MASKS[2])]
    found = [reference(strategy, cut) for cut in cuts]
    losses = [float(each.loss.detach()) for each in found]
    mean = sum(n * loss for n, loss in zip(positions, losses)) / sum(positions)
    assert result.avg_loss == pytest.approx(mean, rel=1e-10)
    assert result.avg_loss != pytest.approx(sum(losses) / 2, rel=1e-3)
    by_step = zip(*(each.step_losses for each in found), strict=True)
    means = [sum(n * loss for n, loss in zip(positions, step)) / sum(positions) for step in by_step]
    metrics = result.metrics()
    assert [metrics[f"eval/ploss_{i}"] for i in range(len(means))] == pytest.approx(means, rel=1e-10)
    decayed = sum(strategy.options.step_decay**i * loss for i, loss in enumerate(means))
    assert result.avg_loss == pytest.approx(decayed, rel=1e-10), "its own losses by position say the same"


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_a_short_unroll_trains_two_steps_with_the_weight_of_all(make_strategy, make_sample, loss):
    samples = [make_sample(mask, seed, torch.float64) for seed, mask in enumerate(MASKS)]
    whole, two, short = (
        make_strategy(torch.float64, loss=loss, ttt_length=length, short_unroll=share)
        for length, share in ((4, 0.0), (2, 0.0), (4, 0.5))
    )
    batch = short.collate(samples, ["a", "b", "c"])
    begun, over = (short.forward_loss(batch, StepContext(step, 10, training=True)) for step in (4, 5))
    decay = short.options.step_decay
    weight = sum(decay**i for i in range(4)) / (1 + decay)
    assert_close(begun.loss_sum, weight * run(two, samples).loss_sum, 1e-12)
    assert begun.metric_sums["acc_denoms"].shape == (2,)
    assert torch.equal(over.loss_sum, run(whole, samples).loss_sum)
    evaluated = [each.forward_loss(batch, StepContext(0, 10, training=False)).loss_sum for each in (short, whole)]
    assert torch.equal(*evaluated)


def test_training_does_not_count_acceptance(make_strategy, make_sample):
    assert not any("acceptance" in name for name in run(make_strategy(), [make_sample(MASKS[0])]).metric_sums)


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_loss_falls_on_a_batch_seen_again_and_again(make_strategy, make_sample, loss):
    strategy, samples = make_strategy(loss=loss), [make_sample(mask, seed) for seed, mask in enumerate(MASKS)]
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        output = run(strategy, samples)
        (output.loss_sum / output.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss_sum.item())
    assert losses[-1] < 0.8 * losses[0]
