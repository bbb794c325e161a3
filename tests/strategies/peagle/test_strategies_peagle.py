"""P-EAGLE trains and proposes what the independent reader of its exports computes, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB
from peagle_cases import CASES
from peagle_reference import Sums, peagle_reader, peagle_sums
from reference_readers import propose_greedily

from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.strategies.peagle import model as peagle_model
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions
from draftworks.strategies.peagle.strategy import PEagleStrategy

OPTIONS = {"num_depths": 4, "num_layers": 2, "draft_vocab_size": DRAFT_VOCAB, "layer_ids": [1, 3, 6]}
MASKS = [[0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]
NAMES = ["a", "b", "c"]
MIDDLE = StepContext(global_step=7, total_steps=20, training=True)
MEASURED = replace(MIDDLE, training=False)


@pytest.fixture
def make(parts, vocab):
    def make(dtype=torch.float64, seed: int = 3, **options) -> PEagleStrategy:
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = PEagleStrategy(PEagleOptions(**OPTIONS | options), moved, vocab, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # away from where they begin, so that a forgotten one shows
            for name, weight in strategy.model.named_parameters():
                if "norm" in name or name == "embed_tokens.weight":
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


def sample(mask: list[int], seed: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("hf1", "hf3", "hf6", "last")
    features = {name: torch.randn(len(mask), HIDDEN, generator=generator).to(dtype) for name in names}
    ids = torch.randint(VOCAB, (len(mask),), generator=generator)
    return {"input_ids": ids, "loss_mask": torch.tensor(mask, dtype=torch.bool), **features}


SAMPLES = [sample(mask, seed) for seed, mask in enumerate(MASKS)]


def side_by_side(one: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([one["hf1"], one["hf3"], one["hf6"]], dim=-1)


def gradients(strategy: PEagleStrategy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*strategy.model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, weights, materialize_grads=True)))


def expected_sums(strategy: PEagleStrategy, samples, kept: torch.Tensor) -> list[Sums]:
    """`kept` (D, B, S) of the padded batch."""
    return [peagle_sums(strategy, s, side_by_side(s), kept[:, row]) for row, s in enumerate(samples)]


@pytest.mark.parametrize("options", [{}, *CASES.variants], ids=str)
def test_loss_and_gradients_are_those_of_the_reader(make, options):
    strategy = make(**options)
    batch = strategy.collate(SAMPLES, NAMES)
    output, kept = strategy.forward_loss(batch, MIDDLE), strategy.select_chains(batch, MIDDLE)
    sums = expected_sums(strategy, SAMPLES, kept)
    expected = sum(one.loss for one in sums)
    torch.testing.assert_close(output.loss_sum, expected)
    assert output.loss_weight == kept.sum()
    assert output.metric_sums["acc_corrects"].tolist() == [sum(right) for right in zip(*(one.corrects for one in sums))]
    assert output.metric_sums["acc_denoms"].tolist() == kept.sum(dim=(1, 2)).tolist()
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)
        has_masks = strategy.options.num_depths > 1
        assert gradient.any() == (has_masks or name != "mask_hidden"), name


@pytest.mark.parametrize("options", [{}, {"num_layers": 1, "down_sample_ratio_min": 0.6}], ids=str)
def test_specforge_takes_the_mean_over_rows_with_a_label_of_a_sample_at_a_time(make, options):
    """Every sample ends one position early, and its chains need the mask at their own places only."""
    strategy = make(loss="specforge", **options)
    for one, name in zip(SAMPLES, NAMES):
        batch = strategy.collate([one], [name])
        output, kept = strategy.forward_loss(batch, MIDDLE), strategy.select_chains(batch, MIDDLE)
        on = [*one["loss_mask"][:-1].tolist(), False]
        for depth, anchors in enumerate(kept[:, 0]):
            for anchor in anchors.nonzero()[:, 0].tolist():
                assert all(on[anchor + 1 : anchor + depth + 1])
                assert on[anchor + depth]
        [sums] = expected_sums(strategy, [one], kept)
        torch.testing.assert_close(output.loss_sum, sums.loss / sums.labelled)
        assert output.loss_weight == 1
        found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, sums.loss / sums.labelled)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("window", [None, 7])
def test_attention_back_ends_give_the_same_draft_and_are_no_part_of_it(make, window):
    samples = [*SAMPLES, sample([0] * 9 + [1] * 70, 8)]  # the last goes through attention in groups
    backends = ("eager", "auto", "sdpa", "flex")
    made = {name: make(attention=name, num_depths=5, sliding_window=window) for name in backends}
    sums = {}
    for name in ("eager", "auto", "sdpa"):
        output = made[name].forward_loss(made[name].collate(samples, [*NAMES, "d"]), MIDDLE)
        sums[name] = {"loss": output.loss_sum.detach(), **gradients(made[name], output.loss_sum)}
    for name in ("auto", "sdpa"):
        torch.testing.assert_close(sums[name], sums["eager"])
    with torch.no_grad():
        measured = [
            made[name].forward_loss(made[name].collate(SAMPLES, NAMES), MEASURED).loss_sum for name in ("flex", "eager")
        ]
    torch.testing.assert_close(*measured)
    assert len({str(strategy.config()) for strategy in made.values()}) == 1


def test_flex_has_no_gradients_on_a_cpu_and_says_so(make):
    strategy = make(attention="flex")
    with pytest.raises(ConfigError, match="peagle: attention flex has no gradients on a CPU"):
        strategy.forward_loss(strategy.collate(SAMPLES, NAMES), MIDDLE)


@pytest.mark.parametrize("measuring", [False, True], ids=["training", "evaluation"])
def test_sums_do_not_depend_on_batching_order_or_padding(make, measuring):
    strategy = make()

    def run(*picked: int, extra: int = 0):
        chosen, names = [SAMPLES[i] for i in picked], [NAMES[i] for i in picked]
        if extra:
            chosen, names = [*chosen, sample([0] * extra, 9)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), MEASURED if measuring else MIDDLE)

    with torch.set_grad_enabled(not measuring):
        whole, parts = run(2, 0, 1, extra=30), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    torch.testing.assert_close(whole.loss_weight, sum(part.loss_weight for part in parts))
    for name, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[name] for part in parts))


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_the_cut_of_a_batch_is_in_the_identity_where_the_loss_depends_on_it(make, loss):
    strategy = make(loss=loss)

    def run(*cut: tuple[int, ...]) -> float:
        found = [
            strategy.forward_loss(strategy.collate([SAMPLES[i] for i in part], [NAMES[i] for i in part]), MIDDLE)
            for part in cut
        ]
        return float(sum(each.loss_sum for each in found) / sum(each.loss_weight for each in found))

    depends = run((0,), (1,), (2,)) != pytest.approx(run((0, 1, 2)), rel=1e-5)
    assert PEAGLE.batch_means(strategy.options) is depends is (loss == "specforge")


def test_what_is_behind_a_sample_has_no_part_in_it(make):
    strategy = make()
    batch = strategy.collate([SAMPLES[1], sample([0] * 20, 1)], ["b", "nothing"])
    clean = strategy.forward_loss(batch, MIDDLE)
    for name in ("features", "last"):
        batch[name][0, len(MASKS[1]) :] = 1e3
    batch["input_ids"][0, len(MASKS[1]) :] = 7
    assert strategy.forward_loss(batch, MIDDLE).loss_sum == clean.loss_sum


def test_an_evaluation_takes_every_chain_whatever_the_step_and_the_seed(make):
    strategy, other = make(), make(seed=8)
    other.model.load_state_dict(strategy.model.state_dict())
    batches = [one.collate(SAMPLES, NAMES) for one in (strategy, strategy, other)]
    with torch.no_grad():
        outputs = [
            one.forward_loss(batch, StepContext(step, training=False))
            for one, batch, step in zip((strategy, strategy, other), batches, (0, 5, 5))
        ]
    assert outputs[0].loss_sum == outputs[1].loss_sum == outputs[2].loss_sum
    # Answers of 5, 4, 3 and 6 tokens, the first of them said by the target.
    assert outputs[0].metric_sums["acc_denoms"].tolist() == [4 + 3 + 2 + 5, 3 + 2 + 1 + 4, 2 + 1 + 3, 1 + 2]
    training = [strategy.forward_loss(batches[0], StepContext(step, training=True)).loss_sum for step in (0, 5)]
    assert training[0] != training[1]


def test_acceptance_is_counted_where_there_are_no_gradients(make):
    strategy = make()
    batch = strategy.collate(SAMPLES, NAMES)
    assert "acceptance_sums" not in strategy.forward_loss(batch, MIDDLE).metric_sums
    with torch.no_grad():
        counts = strategy.forward_loss(batch, MEASURED).metric_sums
    assert (counts["acceptance_sums"] > 0).all()
    assert (counts["acceptance_sums"] < counts["acceptance_denoms"]).all()
    assert (counts["acceptance_denoms"] <= counts["acc_denoms"]).all()
    assert (counts["unconditional_acceptance_sums"] >= counts["acceptance_sums"]).all()


def test_an_evaluation_in_specforges_mode_weighs_a_sample_by_its_supervised_tokens(make):
    strategy = make(loss="specforge")
    batch = strategy.collate(SAMPLES[:1], NAMES[:1])
    with torch.no_grad():
        assert strategy.forward_loss(batch, MEASURED).loss_weight == sum(MASKS[0][:-1])


def test_proposals_are_the_readers_first_choices(make, monkeypatch):
    monkeypatch.setattr(peagle_model, "PROPOSE_CHAINS_AT_ONCE", 3)
    strategy = make(fc_norm=True)
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found, reader = strategy.propose(batch, rows, 4), peagle_reader(strategy)
    for b, t in rows.nonzero().tolist():
        ids, features = SAMPLES[b]["input_ids"], side_by_side(SAMPLES[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], 4)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, 2), found[..., :2])
    assert (strategy.propose(batch, torch.zeros_like(rows), 2) == -1).all()


@pytest.mark.parametrize(
    "options", [{}, {"train_embeddings": False, "norm_before_residual": True}, {"sliding_window": 5}], ids=str
)
def test_a_drafter_fed_in_pieces_proposes_what_the_replay_does(make, options):
    strategy = make(**options)
    one = sample([0] * 4 + [1] * 14, 21)
    rows = torch.ones(1, 18, dtype=torch.bool)
    replayed = strategy.propose(strategy.collate([one], ["a"]), rows, 4)
    drafter, begin = strategy.drafter(), 0
    for end in (4, 5, 8, 9, 14):
        features = {tap: one[tap][begin:end] for tap in strategy.feature_names[:-1]}
        drafter.extend(features, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(4, 0.0, None).tokens.tolist() == replayed[0, end - 1].tolist()
        begin = end


def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(make):
    strategy, one = make(), SAMPLES[0]
    drafter = strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in strategy.feature_names[:-1]}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    logits = peagle_reader(strategy).logits(side_by_side(one)[:6], one["input_ids"][1:7], proposal.tokens)
    torch.testing.assert_close(proposal.probabilities[:, strategy.model.t2d], (logits / 0.7).softmax(-1))
    assert not proposal.probabilities[:, ~strategy.model.t2d].any()
    assert (proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all()


def test_the_checkpoint_holds_embeddings_only_where_they_are_trained(make, parts):
    trained, frozen = make(dtype=torch.float32), make(dtype=torch.float32, train_embeddings=False, fc_norm=True)
    mlp = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    layer = [
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *mlp,
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    own = {"mask_hidden", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight"}
    shared = own | {f"layers.{number}.{name}" for number in (0, 1) for name in layer}
    assert set(trained.model.state_dict()) == shared | {"embed_tokens.weight"}
    assert set(frozen.model.state_dict()) == shared | {f"fc_norm.{tap}.weight" for tap in range(3)}
    assert trained.model.mask_hidden.shape == (1, 1, 3 * HIDDEN)
    assert [layer.self_attn.q_proj.in_features for layer in trained.model.layers] == [2 * HIDDEN, HIDDEN]


def test_training_moves_the_drafts_embeddings_and_leaves_the_targets_alone(parts, vocab):
    strategy = PEagleStrategy(PEagleOptions(**OPTIONS), parts, vocab, seed=3)
    before = parts.embedding.clone()
    assert torch.equal(strategy.model.embed_tokens.weight, before)
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=6e-3)
    batch = strategy.collate([sample(mask, seed, torch.float32) for seed, mask in enumerate(MASKS)], NAMES)
    losses = []
    for _ in range(12):
        output = strategy.forward_loss(batch, StepContext(training=True))
        (output.loss_sum / output.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss_sum.item())
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(parts.embedding, before)
    assert not torch.equal(strategy.model.embed_tokens.weight, before)


def test_a_target_with_one_matrix_for_both_ends_still_teaches_while_embeddings_are_trained(parts, vocab):
    tied = replace(parts, head=parts.embedding)
    for train_embeddings in (True, False):
        options = PEagleOptions(**OPTIONS, train_embeddings=train_embeddings)
        assert torch.equal(PEagleStrategy(options, tied, vocab, seed=3).model.target_head, parts.embedding)


def test_weights_depend_on_the_seed_alone(make):
    first, again, other = (make(seed=seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["mask_hidden"], other["mask_hidden"])


def test_a_draft_is_the_same_after_saving_and_loading(make, tmp_path):
    strategy = make(dtype=torch.float32)
    other = make(dtype=torch.float32, seed=99, attention="eager")
    save_draft(tmp_path, strategy, target_digest="t")
    load_draft(tmp_path, other, target_digest="t")
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


@pytest.mark.parametrize(
    "structural",
    [{"num_depths": 3}, {"mask_token_id": 4}, {"num_layers": 3}, {"norm_before_residual": True}, {"fc_norm": True}],
    ids=str,
)
def test_a_draft_that_computes_otherwise_is_nothing_to_start_from(make, tmp_path, structural):
    save_draft(tmp_path, make(dtype=torch.float32), target_digest="t")
    trained_otherwise = make(dtype=torch.float32, seed=8, down_sample_ratio=0.5, loss="specforge")
    load_draft(tmp_path, trained_otherwise, target_digest="t", to_train=True)
    with pytest.raises(StoreError, match=f"{next(iter(structural))}"):
        load_draft(tmp_path, make(dtype=torch.float32, **structural), target_digest="t", to_train=True)


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
@pytest.mark.parametrize("mask", [[0] * 6, [1], [0, 1]], ids=str)
def test_a_batch_without_a_supervised_row_still_has_a_gradient_for_every_weight(make, loss, mask):
    strategy = make(loss=loss)
    output = strategy.forward_loss(strategy.collate([sample(mask, 1)], ["a"]), MIDDLE)
    output.loss_sum.backward()
    assert output.loss_sum == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


def test_bfloat16_compute_stays_near_float32(make):
    exact, rounded = make(dtype=torch.float32), make(dtype=torch.float32)
    for parameter in rounded.model.parameters():
        parameter.data = parameter.data.bfloat16()
    samples = [sample(mask, seed, torch.float32) for seed, mask in enumerate(MASKS)]
    wide, narrow = (one.forward_loss(one.collate(samples, NAMES), MIDDLE) for one in (exact, rounded))
    assert narrow.loss_sum.item() == pytest.approx(wide.loss_sum.item(), rel=0.02)
    found, expected = gradients(rounded, narrow.loss_sum), gradients(exact, wide.loss_sum)
    for name, grad in found.items():
        assert torch.nn.functional.cosine_similarity(grad.float().flatten(), expected[name].flatten(), dim=0) > 0.98


def test_more_proposals_than_were_trained_are_refused(make):
    strategy = make()
    batch = strategy.collate(SAMPLES, NAMES)
    with pytest.raises(ConfigError, match="peagle: the draft proposes 4 tokens, asked for 5"):
        strategy.propose(batch, batch["loss_mask"], 5)


def test_vocabulary_mappings_that_do_not_fit_are_refused(parts, vocab):
    with pytest.raises(ConfigError, match="peagle predicts over a reduced vocabulary.*found none"):
        PEagleStrategy(PEagleOptions(**OPTIONS), parts, None, seed=0)
    with pytest.raises(ConfigError, match="peagle: draft_vocab_size is 30, the vocabulary mapping holds 24"):
        PEagleStrategy(PEagleOptions(**OPTIONS | {"draft_vocab_size": 30}), parts, vocab, seed=0)


def test_a_feature_of_another_shape_is_refused_by_name(make):
    broken = {**SAMPLES[0], "hf3": SAMPLES[0]["hf3"][:-1]}
    with pytest.raises(DataError, match="sample b: feature hf3"):
        make().collate([SAMPLES[1], broken], ["a", "b"])
