"""P-EAGLE trains and proposes what the independent reader of its exports computes, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB
from peagle_reference import Sums, peagle_reader, peagle_sums
from reference_readers import propose_greedily

from draftworks.drafts.strategy import StepContext
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
