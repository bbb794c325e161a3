"""LiLiCorr trains and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_reference import Sums, lilicorr_sums
from dflash_toys import MASKS, OPTIONS, anchors_drawn, gradients, sample, side_by_side
from draft_toys import HIDDEN, VOCAB
from reference_readers import lilicorr_reader, propose_greedily

from draftworks.config.strategies import TargetSizes
from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, StoreError
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.lilicorr.lattice import Candidates, LatticeScores
from draftworks.strategies.lilicorr.loss import follow_labels
from draftworks.strategies.lilicorr.options import LiLiCorrOptions, check_lilicorr
from draftworks.strategies.lilicorr.strategy import LiLiCorrStrategy

LATTICE = {"candidate_topk": 32, "lattice_size": 8, "lattice_heads": 2, "factor_dim": 6}
"""Of 40 tokens, so that random labels are mostly candidates."""
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 4}
STREAMS = ("hf1", "hf3", "hf6", "last")
NAMES = ["a", "b", "c"]
TRAINING = StepContext(5, 20, training=True)
SAMPLES = [sample(mask, seed, taps=STREAMS) for seed, mask in enumerate(MASKS)]


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, seed: int = 3, **options) -> LiLiCorrStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=0.2 * parts.head.to(dtype))
        strategy = LiLiCorrStrategy(LiLiCorrOptions(**OPTIONS | LATTICE | options), moved, None, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for weight in strategy.model.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


def expected_sums(strategy: LiLiCorrStrategy, batch) -> list[Sums]:
    drawn = anchors_drawn(strategy, batch, TRAINING.global_step)
    return [lilicorr_sums(strategy, one, side_by_side(one), anchors) for one, anchors in zip(SAMPLES, drawn)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gamma": 2.0, "ce_weight": 0.125, "margin_weight": 0.125},
        {"weighting": "dpace", "margin_weight": 0.7, "margin": 0.5, "penalty_weight": 0.0},
        {"objective_chunk_blocks": 1, "sliding_window": 3, "lattice_size": None, "candidate_topk": 8},
        {"candidate_topk": 1, "lattice_layers": 1},
        {"conv_kernel_size": 3, "conv_group_size": 4, "sliding_window": 4, "sliding_layers": [1]},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_reader(make, options):
    strategy = make(**options)
    batch = strategy.collate(SAMPLES, NAMES)
    output, expected = strategy.forward_loss(batch, TRAINING), expected_sums(strategy, batch)
    loss = sum(one.loss for one in expected)
    torch.testing.assert_close(output.loss_sum, loss, rtol=1e-8, atol=1e-8)
    found = gradients(strategy, output.loss_sum)
    names, weights = zip(*strategy.model.named_parameters())
    wanted = torch.autograd.grad(loss, weights, materialize_grads=True)
    for name, gradient in zip(names, wanted):
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * max(1, float(gradient.norm())))
    if options.get("candidate_topk", 32) == 32:
        assert all(found[name].any() for name in names), "every weight learns"


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_counts_are_those_of_the_reader(make, loss):
    strategy = make(loss=loss, num_anchors=12)
    batch = strategy.collate(SAMPLES, NAMES)
    counts, expected = strategy.forward_loss(batch, TRAINING).metric_sums, expected_sums(strategy, batch)
    assert counts["lattice_len_sums"] > 0
    assert counts["accept_len_denoms"] == sum(one.sums["blocks"] for one in expected)
    for name in ("accept_len", "base_accept_len", "lattice_len"):
        assert counts[f"{name}_sums"] == sum(one.sums[name] for one in expected)
    if loss == "token_mean":
        for name in ("in_lattice_sums", "acc_corrects"):
            torch.testing.assert_close(counts[name], sum(one.by_place[name] for one in expected))


def test_labels_are_followed_through_the_lattice():
    """One block of two places with two candidates each, by hand."""
    tokens = torch.tensor([[[7, 3], [5, 7]]])
    scores = LatticeScores(torch.tensor([[1.0, 2.0]]), torch.tensor([[[[3.0, 4.0], [6.0, 5.0]]]]))
    chain = follow_labels(Candidates(tokens, torch.zeros(1, 2, 2)), scores, torch.tensor([[3, 7]]))
    assert chain.label_index.tolist() == [[1, 1]]
    assert chain.logits.tolist() == [[[1.0, 2.0], [6.0, 5.0]]]
    assert chain.is_chosen.tolist() == [[True, False]]
    beside = follow_labels(Candidates(tokens, torch.zeros(1, 2, 2)), scores, torch.tensor([[9, 7]]))
    assert beside.found.tolist() == [[False, True]]
    assert beside.reachable.tolist() == [[False, False]]


@pytest.mark.parametrize(("loss", "weighting"), [("token_mean", "uniform"), ("specforge", "dpace")])
def test_sums_do_not_depend_on_batching_order_or_padding(make, loss, weighting):
    strategy = make(loss=loss, weighting=weighting, num_anchors=3)

    def run(*picked: int, extra: int = 0):
        chosen, names = [SAMPLES[i] for i in picked], [NAMES[i] for i in picked]
        if extra:
            chosen, names = [*chosen, sample([0] * extra, 9, taps=STREAMS)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), TRAINING)

    whole, parts = run(2, 0, 1, extra=30), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=str)
def test_the_backbone_begins_as_dflash(parts, options):
    """Its convolutions are the identity then."""
    strategy = LiLiCorrStrategy(LiLiCorrOptions(**OPTIONS | LATTICE | options), parts, None, seed=3)
    dflash = DFlashStrategy(DFlashOptions(**OPTIONS), parts, None, seed=3)
    backbone = strategy.model.backbone.state_dict()
    assert all(torch.equal(weight, backbone[name]) for name, weight in dflash.model.state_dict().items())
    batch = dflash.collate(SAMPLES, NAMES)
    rows = batch["loss_mask"].bool()
    proposed = [each.backbone.propose(batch["input_ids"], batch["features"], rows, 3) for each in (strategy, dflash)]
    assert torch.equal(*proposed)


def test_an_identity_is_that_from_before_there_were_convolutions():
    plain, convolved = (LiLiCorrOptions(**OPTIONS, **more).to_identity() for more in ({}, CONVOLVED))
    assert convolved == {**plain, **CONVOLVED}


def test_one_candidate_proposes_what_the_backbone_does(make):
    strategy = make(candidate_topk=1)
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.ones(batch["input_ids"].shape, dtype=torch.bool)
    alone = strategy.backbone.propose(batch["input_ids"], batch["features"], rows, 3)
    assert torch.equal(strategy.propose(batch, rows, 3), alone)


@pytest.mark.parametrize(
    "options", [{}, {"candidate_topk": 4, "sliding_window": 4, "sliding_layers": [0]}, CONVOLVED], ids=str
)
def test_proposals_are_the_readers_first_choices(make, options):
    strategy = make(**options)
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, 3), lilicorr_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], 3)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])


def test_a_drafter_fed_in_pieces_proposes_what_the_replay_does(make):
    strategy = make(sliding_window=5)
    one = sample([0] * 4 + [1] * 14, 21, taps=STREAMS)
    replayed = strategy.propose(strategy.collate([one], ["a"]), torch.ones(1, 18, dtype=torch.bool), 3)
    drafter, begin = strategy.drafter(), 0
    for end in (4, 5, 8, 9, 14):
        features = {tap: one[tap][begin:end] for tap in strategy.feature_names}
        drafter.extend(features, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(3, 0.0, None).tokens.tolist() == replayed[0, end - 1].tolist()
        begin = end


def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(make):
    strategy, one = make(candidate_topk=4), SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in strategy.feature_names}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    logits = lilicorr_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities, (logits / 0.7).softmax(-1))
    assert ((proposal.probabilities > 0).sum(-1) == 4).all(), "only candidates are drawn"


def test_a_draft_is_the_same_after_saving_and_loading(make, tmp_path):
    strategy, other = make(dtype=torch.float32), make(dtype=torch.float32, seed=99, objective_chunk_blocks=2)
    save_draft(tmp_path, strategy, target_digest="t")
    load_draft(tmp_path, other, target_digest="t")
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    for structural in ({"candidate_topk": 16}, {"logit_scale": 4.0}, {"vector_eps": 1e-3}):
        with pytest.raises(StoreError, match=next(iter(structural))):
            load_draft(tmp_path, make(dtype=torch.float32, **structural), target_digest="t", to_train=True)


def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make):
    strategy = make()
    output = strategy.forward_loss(strategy.collate([sample([0] * 6, 1, taps=STREAMS)], ["a"]), TRAINING)
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


def test_bad_input_is_refused(make):
    with pytest.raises(
        ConfigError, match="lattice_heads 2 do not divide the width 9 .* set lattice_size or lattice_heads"
    ):
        make(lattice_size=9)
    with pytest.raises(ConfigError, match="lilicorr: mask_token_id 40"):
        make(mask_token_id=VOCAB)
    sizes = TargetSizes(num_layers=8, hidden_size=HIDDEN, vocab_size=VOCAB, max_length=64)
    with pytest.raises(ConfigError, match="lilicorr: conv_group_size 5 does not divide the target's hidden_size"):
        check_lilicorr(LiLiCorrOptions(**OPTIONS | LATTICE | {"conv_kernel_size": 2, "conv_group_size": 5}), sizes)
    for bad, message in (
        ({"ce_weight": 0, "penalty_weight": 0}, "the reranker would stay random"),
        ({"vector_eps": 0.5}, "vector_eps"),
        ({"candidate_topk": 0}, "candidate_topk"),
        ({"conv_kernel_size": 2}, "set both, or none"),
        ({"conv_kernel_size": 7, "conv_group_size": 4}, "conv_kernel_size 7 is more than block_size"),
    ):
        with pytest.raises(ValueError, match=message):
            LiLiCorrOptions(**OPTIONS | LATTICE | bad)
