"""Domino trains, at every step of its schedule, and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_reference import Sums, domino_sums
from coverings import gate_or_long
from dflash_toys import SAMPLES, anchors_drawn, gradients, sample, side_by_side
from draft_toys import VOCAB
from reference_readers import domino_reader, propose_greedily

from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, StoreError
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy

OPTIONS = {
    "block_size": 4,
    "num_layers": 2,
    "layer_ids": [1, 3, 6],
    "num_anchors": 5,
    "emb_dim": 6,
    "gru_hidden_dim": 5,
}
NAMES = ["a", "b", "c"]
HALFWAY = StepContext(global_step=5, total_steps=20, training=True)
"""Where λ is 0.5 by default."""
SCHEDULES = [
    ({}, 0, 1.0),
    ({}, 5, 0.5),
    ({}, 9, 0.1),
    ({}, 15, 0.0),
    ({"gamma": 2.0, "lambda_base_start": 0.6, "lambda_base_decay_ratio": 1.0}, 5, 0.45),
    ({"loss": "specforge", "pure_draft_prefix_len": 0}, 5, 0.5),
    ({"weighting": "dpace", "pure_draft_prefix_len": 2}, 5, 0.5),
    ({"objective_chunk_blocks": 1, "sliding_window": 3}, 5, 0.5),
]
"""Options, a step, and λ there."""
BOTH_SHIFTS = pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "unshifted"])


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, seed: int = 3, **options) -> DominoStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = DominoStrategy(DominoOptions(**OPTIONS | options), moved, None, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for name, weight in strategy.model.named_parameters():
                if "norm" in name or name == "correction.embed_proj.2.weight":
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


def expected_sums(strategy: DominoStrategy, samples, batch, ctx: StepContext, lambda_base: float) -> list[Sums]:
    anchors = anchors_drawn(strategy, batch, ctx.global_step)
    return [domino_sums(strategy, s, side_by_side(s), drawn, lambda_base) for s, drawn in zip(samples, anchors)]


@pytest.mark.parametrize(
    ("shift_label", "options", "step", "lambda_base"),
    gate_or_long(
        [(shift, *schedule) for shift in (True, False) for schedule in SCHEDULES],
        lambda cell: cell[0] or cell[1:3] == ({}, 5),
    ),
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_reader(make, shift_label, options, step, lambda_base):
    strategy = make(shift_label=shift_label, **options)
    batch, ctx = strategy.collate(SAMPLES, NAMES), StepContext(step, total_steps=20, training=True)
    output = strategy.forward_loss(batch, ctx)
    expected = sum(one.loss for one in expected_sums(strategy, SAMPLES, batch, ctx, lambda_base))
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-6, atol=1e-6)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
        assert bool(gradient.any()) == (lambda_base < 1 or "correction" not in name), name


@BOTH_SHIFTS
@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_accepted_lengths_are_those_of_the_reader(make, shift_label, loss):
    strategy = make(shift_label=shift_label, loss=loss, num_anchors=12)
    easy = half_easy(strategy)
    batch = strategy.collate(easy, NAMES)
    counts = strategy.forward_loss(batch, HALFWAY).metric_sums
    expected = expected_sums(strategy, easy, batch, HALFWAY, lambda_base=0.5)
    assert counts["accept_len_sums"] > 0
    for name in ("accept_len_sums", "base_accept_len_sums", "accept_len_denoms"):
        assert counts[name] == sum(one.sums[name] for one in expected)


def half_easy(strategy: DominoStrategy) -> list[dict[str, torch.Tensor]]:
    """The samples with answers of which the draft says a part: what it proposes itself after some of the tokens."""
    easy = []
    for one in SAMPLES:
        ids = one["input_ids"].clone()
        for anchor in range(3, len(ids) - 1, 4):
            after = slice(anchor + 1, anchor + 1 + strategy.options.labels)
            known = (side_by_side(one)[:anchor], ids[1 : anchor + 1])
            ids[after] = torch.tensor(propose_greedily(domino_reader(strategy), *known, len(ids[after])))
        easy.append({**one, "input_ids": ids})
    return easy


@pytest.mark.parametrize(("loss", "weighting"), [("token_mean", "uniform"), ("specforge", "dpace")])
@BOTH_SHIFTS
def test_sums_do_not_depend_on_batching_order_or_padding(make, shift_label, loss, weighting):
    strategy = make(shift_label=shift_label, loss=loss, weighting=weighting, num_anchors=3)

    def run(*picked: int, extra: int = 0):
        chosen, names = [SAMPLES[i] for i in picked], [NAMES[i] for i in picked]
        if extra:
            chosen, names = [*chosen, sample([0] * extra, 9)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), HALFWAY)

    whole, parts = run(2, 0, 1, extra=30), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    if weighting == "uniform":
        torch.testing.assert_close(whole.loss_weight, sum(part.loss_weight for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


@BOTH_SHIFTS
def test_packed_samples_give_the_sums_and_proposals_of_padded_ones(make, shift_label):
    strategy = make(shift_label=shift_label)
    padded, packed = (lay(SAMPLES, NAMES) for lay in (strategy.collate, strategy.pack))
    outputs = [strategy.forward_loss(batch, HALFWAY) for batch in (padded, packed)]
    torch.testing.assert_close(outputs[1].loss_sum, outputs[0].loss_sum)
    for name, total in outputs[0].metric_sums.items():
        torch.testing.assert_close(outputs[1].metric_sums[name], total)
    rows = [torch.ones(batch["input_ids"].shape, dtype=torch.bool) for batch in (padded, packed)]
    apart, together = (strategy.propose(batch, on, 3) for batch, on in zip((padded, packed), rows))
    begins = 0
    for row, one in enumerate(SAMPLES):
        length = len(one["input_ids"])
        assert torch.equal(together[0, begins : begins + length - 1], apart[row, : length - 1])
        begins += length


def test_the_share_of_the_base_loss_falls_to_nothing_and_needs_a_horizon():
    options = DominoOptions()
    assert [options.compute_lambda_base(step, 11) for step in (0, 1, 4, 5, 10)] == [
        1.0,
        0.8,
        pytest.approx(0.2),
        0.0,
        0.0,
    ]
    assert options.compute_lambda_base(3, 0) == 0.0
    at_once = DominoOptions(lambda_base_decay_ratio=0.0, lambda_base_start=0.3)
    assert [at_once.compute_lambda_base(step, 11) for step in (0, 1)] == [0.3, 0.0]


def test_an_evaluation_looks_at_what_is_served_whatever_the_step(make):
    strategy = make(num_anchors=2)
    batch = strategy.collate(SAMPLES, NAMES)
    with torch.no_grad():
        outputs = [strategy.forward_loss(batch, StepContext(step, 20, training=False)) for step in (0, 5, 20)]
    assert outputs[0].loss_sum == outputs[1].loss_sum == outputs[2].loss_sum
    torch.testing.assert_close(outputs[0].loss_sum, outputs[0].metric_sums["loss_sums"].sum())


def test_an_untrained_draft_proposes_what_its_backbone_does(parts):
    shared = {name: OPTIONS[name] for name in ("block_size", "num_layers", "layer_ids")}
    strategy = DominoStrategy(DominoOptions(**OPTIONS, shift_label=False), parts, None, seed=3)
    backbone = DFlashStrategy(DFlashOptions(**shared), parts, None, seed=3)
    batch = strategy.collate([sample([1] * 9, 2, torch.float32)], ["a"])
    rows = torch.ones(1, 9, dtype=torch.bool)
    assert torch.equal(strategy.propose(batch, rows, 3), backbone.propose(batch, rows, 3))


@pytest.mark.parametrize(("shift_label", "count", "prefix"), [(True, 4, 1), (False, 3, 1), (True, 3, 0), (False, 3, 2)])
def test_proposals_are_the_readers_first_choices(make, shift_label, count, prefix):
    strategy = make(shift_label=shift_label, pure_draft_prefix_len=prefix, sliding_window=4, sliding_layers=[0])
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, count), domino_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], count)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])


@BOTH_SHIFTS
def test_a_drafter_fed_in_pieces_proposes_what_the_replay_does(make, shift_label):
    strategy = make(shift_label=shift_label, sliding_window=5)
    one = sample([0] * 4 + [1] * 14, 21)
    rows = torch.ones(1, 18, dtype=torch.bool)
    replayed = strategy.propose(strategy.collate([one], ["a"]), rows, 3)
    drafter, begin = strategy.drafter(), 0
    for end in (4, 5, 8, 9, 14):
        features = {tap: one[tap][begin:end] for tap in strategy.feature_names}
        drafter.extend(features, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(3, 0.0, None).tokens.tolist() == replayed[0, end - 1].tolist()
        begin = end


@BOTH_SHIFTS
def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(make, shift_label):
    strategy = make(shift_label=shift_label)
    one = SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in strategy.feature_names}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    logits = domino_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities, (logits / 0.7).softmax(-1))
    assert (proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all()


def test_a_draft_is_the_same_after_saving_and_loading(make, tmp_path):
    strategy = make(dtype=torch.float32)
    other = make(dtype=torch.float32, seed=99, attention="eager", objective_chunk_blocks=2)
    save_draft(tmp_path, strategy, target_digest="t")
    load_draft(tmp_path, other, target_digest="t")
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    with pytest.raises(StoreError, match="strategy: expected dflash, found domino"):
        load_draft(tmp_path, DFlashStrategy(DFlashOptions(), strategy.target, None, 0), target_digest="t")


@pytest.mark.parametrize("structural", [{"shift_label": False}, {"pure_draft_prefix_len": 2}, {"gru_hidden_dim": 7}])
def test_a_draft_that_computes_otherwise_is_nothing_to_start_from(make, tmp_path, structural):
    save_draft(tmp_path, make(dtype=torch.float32), target_digest="t")
    trained_otherwise = make(dtype=torch.float32, seed=8, gamma=3.0, lambda_base_start=0.5)
    load_draft(tmp_path, trained_otherwise, target_digest="t", to_train=True)
    with pytest.raises(StoreError, match=f"{next(iter(structural))}"):
        load_draft(tmp_path, make(dtype=torch.float32, **structural), target_digest="t", to_train=True)


def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make):
    strategy = make()
    output = strategy.forward_loss(strategy.collate([sample([0] * 6, 1)], ["a"]), HALFWAY)
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


def test_flex_with_gradients_on_a_cpu_is_refused_in_dominos_name(make):
    strategy = make(attention="flex")
    with pytest.raises(ConfigError, match="domino: attention flex has no gradients on a CPU"):
        strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HALFWAY)


def test_bad_input_is_refused(make, parts, vocab):
    batch = make().collate(SAMPLES, NAMES)
    for shift_label, most in ((True, 4), (False, 3)):
        with pytest.raises(ConfigError, match=f"domino: .* proposes {most} tokens, asked for {most + 1}"):
            make(shift_label=shift_label).propose(batch, torch.ones(3, 12, dtype=torch.bool), most + 1)
    with pytest.raises(ConfigError, match="domino: mask_token_id 40"):
        make(mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match="domino predicts .* no vocabulary mapping"):
        DominoStrategy(DominoOptions(**OPTIONS), parts, vocab, 0)
    for bad, message in (
        ({"pure_draft_prefix_len": 4}, r"leaves none of the 4 proposals of a block to correct: expected 0\.\.3"),
        ({"pure_draft_prefix_len": 3, "shift_label": False}, r"none of the 3 proposals"),
        ({"lambda_base_start": 1.5}, "lambda_base_start"),
        ({"gru_hidden_dim": 0}, "gru_hidden_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            DominoOptions(**OPTIONS | bad)
