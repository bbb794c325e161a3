"""The real EAGLE-3 strategy through the trainer, on samples of unequal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_toys import eval_loader, train_loader

from draftworks.config.registry_files import TrainingSpec
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.strategy import StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.storage.identity import digest
from draftworks.strategies.eagle3.options import EAGLE3, Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy
from draftworks.training.history import History
from draftworks.training.trainer import Trainer

HIDDEN, VOCAB, GLOBAL = 16, 40, 8
SPEC = TrainingSpec(global_batch_size=GLOBAL, epochs=2, lr=5e-3, compute_dtype="float32", log_every=1, eval_every=2)


def target_parts() -> TargetParts:
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    return TargetParts(
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_layers=8,
        max_positions=64,
        embedding=table,
        head=table,
    )


def eagle3(**options: Any) -> Eagle3Strategy:
    vocab = build_vocab_mapping(np.arange(VOCAB)[::-1].copy(), 24)
    return Eagle3Strategy(Eagle3Options(ttt_length=3, draft_vocab_size=24, **options), target_parts(), vocab, seed=7)


def ragged(count: int, seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    samples = {}
    for index in range(count):
        length = int(torch.randint(6, 30, (), generator=generator))
        tokens = {
            "input_ids": torch.randint(0, VOCAB, (length,), generator=generator),
            "loss_mask": torch.arange(length) >= int(torch.randint(1, length - 3, (), generator=generator)),
        }
        features = {n: torch.randn(length, HIDDEN, generator=generator) for n in ("hf2", "hf4", "hf5", "last")}
        samples[f"s{index}"] = tokens | features
    return samples


def trained(micro: int, rank: int = 0, world: int = 1, **options: Any) -> Trainer:
    strategy = eagle3(**options)
    train, held_out = ragged(19, seed=1), ragged(5, seed=2)
    trainer = Trainer(
        strategy,
        train_loader(strategy, train, micro, GLOBAL, rank, world),
        eval_loader(strategy, held_out, 2, rank, world),
        SPEC,
        torch.device("cpu"),
    )
    trainer.fit()
    return trainer


def assert_same(weights: dict[str, Tensor], history: History, expected: Trainer) -> None:
    """Weights to a hundredth of the learning rate: Adam turns rounding of gradients near 0 into that much."""
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=5e-5)
    for mine, theirs in zip(history.train, expected.controller.history.train, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    for mine, theirs in zip(history.evals, expected.controller.history.evals, strict=True):
        assert mine.result.supervised == theirs.result.supervised
        assert mine.result.avg_loss == pytest.approx(theirs.result.avg_loss, rel=1e-5)


def _train_and_save(rank: int, folder: Path) -> None:
    trainer = trained(micro=2, rank=rank, world=2)
    weights = trainer.weights()
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        trainer.controller.history.save(folder / "history.json")


def test_eagle3_on_two_ranks_and_other_micro_batches_equals_one_big_batch(tmp_path: Path, one_rank: None) -> None:
    on_ranks(2, tmp_path, _train_and_save, tmp_path)
    whole, single = trained(micro=GLOBAL), trained(micro=1)
    assert_same(single.weights(), single.controller.history, whole)
    assert_same(load_file(tmp_path / "weights.safetensors"), History.load(tmp_path / "history.json"), whole)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "options",
    [
        {"objective": "lk_alpha", "norm_output": False},
        {"objective": "lk_lambda", "kl_scale": 3.0, "fc_norm": True, "feedback": "post_norm"},
    ],
)
def test_no_option_makes_training_depend_on_micro_batches(options: dict[str, Any]) -> None:
    whole, single = trained(micro=GLOBAL, **options), trained(micro=1, **options)
    assert_same(single.weights(), single.controller.history, whole)
    initial, final = eagle3(**options).model.state_dict(), whole.weights()
    kept = {name for name, tensor in initial.items() if torch.equal(tensor, final[name])}
    assert kept == {"d2t", "t2d"} | ({"norm.weight"} if options.get("norm_output") is False else set())


@pytest.mark.usefixtures("one_rank")
def test_specforge_mode_averages_micro_batches() -> None:
    """The reference's loss is a mean over padded positions, so it is the number of micro-batches that divides."""
    strategy = eagle3(loss="specforge")
    trainer = Trainer(
        strategy,
        train_loader(strategy, ragged(GLOBAL, seed=1), 2, GLOBAL),
        eval_loader(strategy, ragged(5, seed=2), 2),
        SPEC.model_copy(update={"epochs": 1.0}),
        torch.device("cpu"),
    )
    batches = list(train_loader(strategy, ragged(GLOBAL, seed=1), 2, GLOBAL))
    assert len(batches) == 4
    fresh = eagle3(loss="specforge")
    losses = [fresh.forward_loss(batch, trainer.controller._context()).loss_sum.item() for batch in batches]
    assert trainer.fit().train[0].loss == pytest.approx(sum(losses) / 4, rel=1e-6)


CUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (1, 8)]
"""Samples of a micro-batch, ranks."""


def find_step_loss(micro: int, world: int, **options: Any) -> float:
    """The loss of the first optimizer step, whose gradient the trainer takes: sums of all micro-batches, divided once."""
    strategy, samples = eagle3(**options), ragged(GLOBAL, seed=1)
    batches = [batch for rank in range(world) for batch in train_loader(strategy, samples, micro, GLOBAL, rank, world)]
    context = StepContext(training=True)
    found = [strategy.forward_loss(batch, context) for batch in batches]
    return float(sum(each.loss_sum for each in found) / sum(each.loss_weight for each in found))


@pytest.mark.parametrize("objective", ["ce", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_two_cuts_of_a_batch_have_one_identity_where_they_give_one_loss(loss: str, objective: str) -> None:
    """Else another cut would be a hit of a draft that was trained otherwise, or a needless training."""
    options = {"loss": loss, "objective": objective}
    batch_means = EAGLE3.batch_means(Eagle3Options(**options))
    losses: dict[str, set[float]] = {}
    for micro, world in CUTS:
        spec = SPEC.model_copy(update={"micro_batch_size": micro, "processes": world})
        of = losses.setdefault(digest(spec.to_identity(batch_means)), set())
        of.add(round(find_step_loss(micro, world, **options), 4))
    assert all(len(found) == 1 for found in losses.values())
    assert len(set.union(*losses.values())) == len(losses)
    assert len(losses) == (3 if loss == "specforge" else 1)
