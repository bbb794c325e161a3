"""DSpark trains and proposes, with every head, what the independent reader of its exports computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from block_reference import Sums, dspark_sums
from coverings import gate_or_long
from dflash_toys import MASKS, OPTIONS, anchors_drawn, gradients, sample, side_by_side
from draft_toys import VOCAB
from reference_readers import dspark_reader, propose_greedily
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.dspark.strategy import DSparkStrategy

NAMES = ["a", "b", "c"]
STREAMS = ("hf1", "hf3", "hf6", "last")
HERE = StepContext(global_step=7, training=True)
HEADS = [
    {},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn", "confidence_with_markov": False},
    {"markov_rank": 0, "confidence_head": False},
]
ALL_HEADS = pytest.mark.parametrize("heads", HEADS, ids=["vanilla", "gated", "rnn", "none"])
OBJECTIVES = [
    {},
    {"gamma": 2.0, "ce_weight": 1.0, "tv_weight": 0.0, "confidence_weight": 0.5},
    {"weighting": "dpace", "ce_weight": 0.0},
    {"objective_chunk_blocks": 2, "sliding_window": 3},
]


def taught(mask: list[int], seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return sample(mask, seed, dtype, taps=STREAMS)


SAMPLES = [taught(mask, seed) for seed, mask in enumerate(MASKS)]


@pytest.fixture
def make(parts):
    def make(dtype=torch.float64, seed: int = 3, **options) -> DSparkStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = DSparkStrategy(DSparkOptions(**OPTIONS | {"markov_rank": 5} | options), moved, None, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for name, weight in strategy.model.named_parameters():
                if "norm" in name or not weight.any():
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


def expected_sums(strategy: DSparkStrategy, samples: list[dict[str, Tensor]], batch) -> list[Sums]:
    anchors = anchors_drawn(strategy, batch, HERE.global_step)
    return [dspark_sums(strategy, one, side_by_side(one), drawn) for one, drawn in zip(samples, anchors)]


def half_easy(strategy: DSparkStrategy) -> list[dict[str, Tensor]]:
    """The samples with answers of which the draft says a part: what it proposes itself after some of the tokens."""
    easy = []
    for one in SAMPLES:
        ids = one["input_ids"].clone()
        for anchor in range(3, len(ids) - 1, 5):
            after = slice(anchor + 1, anchor + 1 + strategy.options.block_size)
            known = (side_by_side(one)[:anchor], ids[1 : anchor + 1])
            ids[after] = torch.tensor(propose_greedily(dspark_reader(strategy), *known, len(ids[after])))
        easy.append({**one, "input_ids": ids})
    return easy


@pytest.mark.parametrize(
    ("heads", "options"), gate_or_long(product(HEADS, OBJECTIVES), lambda cell: {} in cell), ids=str
)
def test_loss_and_gradients_are_those_of_the_reader(make, heads, options):
    strategy = make(**heads, **options)
    batch = strategy.collate(SAMPLES, NAMES)
    output = strategy.forward_loss(batch, HERE)
    expected = sum(one.loss for one in expected_sums(strategy, SAMPLES, batch))
    torch.testing.assert_close(output.loss_sum, expected)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        assert gradient.any(), name


@ALL_HEADS
def test_metric_sums_are_those_of_the_reader(make, heads):
    strategy = make(**heads, num_anchors=12)
    samples = half_easy(strategy)
    batch = strategy.collate(samples, NAMES)
    output = strategy.forward_loss(batch, HERE)
    expected = expected_sums(strategy, samples, batch)
    found = dict(output.metric_sums)
    assert found.pop("accept_len_sums") == sum(one.sums["accept_len"] for one in expected) > 0
    torch.testing.assert_close(found.pop("tau_sums").item(), sum(one.sums["tau"] for one in expected))
    assert found.pop("accept_len_denoms") == found.pop("tau_denoms") == sum(one.sums["blocks"] for one in expected)
    by_place = {name: sum(one.by_place[name] for one in expected) for name in expected[0].by_place}
    denoms = {name.replace("_sums", "_denoms") for name in by_place if name.endswith("_sums")}
    by_place |= dict.fromkeys(denoms, by_place["acc_denoms"])
    torch.testing.assert_close(found, by_place)
    torch.testing.assert_close(output.loss_sum.double(), found["loss_sums"].sum())


@pytest.mark.parametrize("weighting", ["uniform", "dpace"])
@ALL_HEADS
def test_sums_do_not_depend_on_batching_order_or_padding(make, heads, weighting):
    strategy = make(**heads, weighting=weighting, num_anchors=3)

    def run(*picked: int, extra: int = 0):
        chosen, names = [SAMPLES[i] for i in picked], [NAMES[i] for i in picked]
        if extra:
            chosen, names = [*chosen, taught([0] * extra, 9)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), HERE)

    whole, parts = run(2, 0, 1, extra=30), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    torch.testing.assert_close(whole.loss_weight, sum(part.loss_weight for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


@pytest.mark.parametrize("weighting", ["uniform", "dpace"])
def test_the_references_loss_is_ours_but_for_the_divisor_with_dpace(make, weighting):
    outputs = [
        strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HERE)
        for strategy in (make(loss=mode, weighting=weighting) for mode in ("token_mean", "specforge"))
    ]
    assert outputs[0].loss_sum == outputs[1].loss_sum
    assert outputs[1].loss_weight == (len(SAMPLES) if weighting == "dpace" else outputs[0].loss_weight)


@ALL_HEADS
def test_no_number_depends_on_how_many_blocks_a_chunk_has(make, heads):
    seen = []
    for size in (1, 3, 100):
        strategy = make(**heads, objective_chunk_blocks=size, gamma=3.0)
        output = strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HERE)
        seen.append([output.loss_sum, *gradients(strategy, output.loss_sum).values(), *output.metric_sums.values()])
    for others in seen[:-1]:
        torch.testing.assert_close(others, seen[-1])


def test_an_evaluation_looks_at_the_same_blocks_whatever_the_step(make):
    strategy = make(num_anchors=2)
    batch = strategy.collate(SAMPLES, NAMES)
    with torch.no_grad():
        first, later = (strategy.forward_loss(batch, StepContext(step, 20, training=False)).loss_sum for step in (0, 5))
    assert first == later
    trained = [strategy.forward_loss(batch, StepContext(step, 20, training=True)).loss_sum for step in (0, 5)]
    assert trained[0] != trained[1]


@ALL_HEADS
def test_an_untrained_draft_proposes_what_its_backbone_does_and_is_in_doubt(parts, heads):
    strategy = DSparkStrategy(DSparkOptions(**OPTIONS | {"markov_rank": 5} | heads), parts, None, seed=3)
    one, backbone = taught([1] * 9, 2, torch.float32), strategy.model.backbone
    batch, rows = strategy.collate([one], ["a"]), torch.ones(1, 9, dtype=torch.bool)

    class Alone(type(backbone)):
        """The backbone, which proposes from the anchor's own place on."""

        def decode(self, blocks, count, choose):
            return F.linear(self.norm(blocks.states[:, :count]), self.target_head).argmax(-1)

    found = strategy.propose(batch, rows, 4)
    backbone.__class__ = Alone
    assert torch.equal(found, backbone.propose(batch["input_ids"], batch["features"], rows, 4))
    if strategy.options.confidence_head:
        known = (side_by_side(one)[:4], one["input_ids"][1:5])
        assert not dspark_reader(strategy).confidence(*known, torch.arange(4)).any()


@ALL_HEADS
def test_proposals_are_the_readers_first_choices(make, heads):
    strategy = make(**heads, sliding_window=4, sliding_layers=[0])
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, 4), dspark_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], 4)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])


@ALL_HEADS
def test_a_drafter_fed_in_pieces_proposes_what_the_replay_does(make, heads):
    strategy = make(**heads, sliding_window=5)
    one = taught([0] * 4 + [1] * 14, 21)
    replayed = strategy.propose(strategy.collate([one], ["a"]), torch.ones(1, 18, dtype=torch.bool), 4)
    drafter, begin = strategy.drafter(), 0
    for end in (4, 5, 8, 9, 13):
        drafter.extend({tap: one[tap][begin:end] for tap in STREAMS}, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(4, 0.0, None).tokens.tolist() == replayed[0, end - 1].tolist()
        begin = end


@ALL_HEADS
def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(make, heads):
    strategy, one = make(**heads), SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in STREAMS}, one["input_ids"][1:7])
    proposal = drafter.propose(4, 0.7, torch.Generator().manual_seed(0))
    logits = dspark_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities, (logits / 0.7).softmax(-1))
    assert (proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all()


@ALL_HEADS
def test_a_draft_is_the_same_after_saving_and_loading(make, heads, tmp_path):
    strategy = make(dtype=torch.float32, **heads)
    other = make(dtype=torch.float32, seed=99, attention="eager", objective_chunk_blocks=2, **heads)
    save_draft(tmp_path, strategy, target_digest="t")
    load_draft(tmp_path, other, target_digest="t")
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def test_names_of_weights_are_the_peers_beside_the_backbone(make):
    def beside(**options) -> set[str]:
        return {name for name in make(**options).model.state_dict() if not name.startswith("backbone.")}

    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    confidence = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert beside() == markov | confidence
    for kind, name in (("gated", "gate_proj"), ("rnn", "joint_proj")):
        own = {f"markov_head.{name}.weight", f"markov_head.{name}.bias"}
        assert beside(markov_head_type=kind, confidence_head=False) == markov | own
    assert beside(markov_rank=0, confidence_with_markov=False) == confidence


@pytest.mark.parametrize(
    "structural",
    [
        {"markov_rank": 7},
        {"markov_head_type": "gated"},
        {"confidence_head": False},
        {"confidence_with_markov": False},
        {"block_size": 3},
    ],
)
def test_a_draft_that_computes_otherwise_is_nothing_to_start_from(make, tmp_path, structural):
    save_draft(tmp_path, make(dtype=torch.float32), target_digest="t")
    trained_otherwise = make(dtype=torch.float32, seed=8, gamma=3.0, tv_weight=0.5)
    load_draft(tmp_path, trained_otherwise, target_digest="t", to_train=True)
    with pytest.raises(StoreError, match=f"{next(iter(structural))}"):
        load_draft(tmp_path, make(dtype=torch.float32, **structural), target_digest="t", to_train=True)


@ALL_HEADS
def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(make, heads):
    strategy = make(**heads)
    output = strategy.forward_loss(strategy.collate([taught([0] * 6, 1)], ["a"]), HERE)
    output.loss_sum.backward()
    assert output.loss_weight == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


@ALL_HEADS
def test_weights_in_bfloat16_beside_buffers_in_float32_give_nearly_the_same(make, heads):
    """As sharding leaves them."""
    samples = [taught(mask, seed, torch.float32) for seed, mask in enumerate(MASKS)]
    wide, narrow = make(torch.float32, **heads), make(torch.float32, **heads)
    for weight in narrow.model.parameters():
        weight.data = weight.data.bfloat16()
    losses = [one.forward_loss(one.collate(samples, NAMES), HERE).loss_sum for one in (wide, narrow)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)
    losses[1].backward()
    assert all(weight.grad.isfinite().all() for weight in narrow.model.parameters())
    said = narrow.propose(narrow.collate(samples, NAMES), torch.ones(3, 12, dtype=torch.bool), 4)
    assert (said[:, :-1] >= 0).all()


def test_flex_with_gradients_on_a_cpu_is_refused_in_dsparks_name(make):
    strategy = make(attention="flex")
    with pytest.raises(ConfigError, match="dspark: attention flex has no gradients on a CPU"):
        strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HERE)


def test_bad_input_is_refused(make, parts, vocab):
    strategy = make()
    with pytest.raises(ConfigError, match="dspark: the draft proposes 4 tokens, asked for 5"):
        strategy.propose(strategy.collate(SAMPLES, NAMES), torch.ones(3, 12, dtype=torch.bool), 5)
    with pytest.raises(ConfigError, match="dspark: mask_token_id 40"):
        make(mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match="dspark predicts .* no vocabulary mapping"):
        DSparkStrategy(DSparkOptions(**OPTIONS), parts, vocab, 0)
    with pytest.raises(DataError, match=r"sample a: feature last: expected shape \(12, 16\), found \(5, 16\)"):
        strategy.collate([{**SAMPLES[0], "last": torch.zeros(5, 16)}], ["a"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"markov_rank": 0}, "markov_rank 0 leaves no Markov embedding .* set confidence_with_markov: false"),
        ({"markov_rank": 0, "markov_head_type": "rnn"}, "markov_head_type rnn, but markov_rank 0"),
        ({"ce_weight": 0, "tv_weight": 0}, "ce_weight and tv_weight are both 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"confidence_weight": -1}, "confidence_weight"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_options_that_do_not_go_together_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        DSparkOptions(**bad)


def markov_samples(head: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Texts in which either of two tokens follows a token; the target knows which two, and the taps know nothing."""
    generator = torch.Generator().manual_seed(0)
    follow = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(2)], dim=1)
    samples = []
    for number in range(count):
        said = [number]
        for which in torch.randint(2, (23,), generator=generator).tolist():
            said.append(int(follow[said[-1], which]))
        ids = torch.tensor(said)
        one = sample([1] * 24, number, torch.float32)
        samples.append({**one, "input_ids": ids, "last": head[follow[ids]].sum(1) / 4})
    return samples


def test_the_markov_head_says_more_than_a_backbone_of_what_follows_a_token(parts):
    """Both learn; and the confidence comes to know better how likely a proposal is."""
    samples, tau = markov_samples(parts.head, 6), {}
    for rank in (16, 0):
        options = DSparkOptions(**OPTIONS | {"num_layers": 1, "num_anchors": 16}, **heads_of_rank(rank))
        strategy = DSparkStrategy(options, parts, None, seed=0)
        batch = strategy.collate(samples, list("abcdef"))
        optimizer, losses, errors = torch.optim.AdamW(strategy.model.parameters(), lr=1e-2), [], []
        for step in range(60):
            output = strategy.forward_loss(batch, StepContext(step, 60, training=True))
            loss = output.loss_sum / output.loss_weight
            losses.append(loss.item())
            errors.append(output.metric_sums["confidence_error_sums"].sum().item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.7 * losses[0]
        assert errors[-1] < 0.7 * errors[0]
        tau[rank] = float(output.metric_sums["tau_sums"] / output.metric_sums["accept_len_denoms"])
    assert tau[16] > 1.3 * tau[0]


def heads_of_rank(rank: int) -> dict[str, object]:
    return {"markov_rank": rank, "confidence_with_markov": rank > 0}
