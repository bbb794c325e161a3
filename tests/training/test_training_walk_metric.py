"""The walk decides which checkpoint is the best, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from test_training_eagle3 import GLOBAL, SPEC, eagle3, ragged
from training_toys import eval_loader, train_loader

from draftworks.evaluation.ladder.replay import replay
from draftworks.evaluation.result import BLOCK_METRIC, WALK_METRIC
from draftworks.training.checkpoint_manager import BestRule, CheckpointManager
from draftworks.training.trainer import Persistence, Trainer

WALKED = SPEC.model_copy(update={"best_metric": WALK_METRIC})


def trained(folder: Path, rank: int = 0, world: int = 1) -> Trainer:
    strategy = eagle3()
    manager = CheckpointManager(folder, "walk", rule=BestRule(WALK_METRIC))
    trainer = Trainer(
        strategy,
        train_loader(strategy, ragged(19, seed=1), 2, GLOBAL, rank, world),
        eval_loader(strategy, ragged(5, seed=2), 2, rank, world),
        WALKED,
        torch.device("cpu"),
        persistence=Persistence(manager),
    )
    assert trainer.can_evaluate()
    trainer.fit()
    return trainer


def walks(trainer: Trainer) -> list[list[float]]:
    points = (point.result.metrics() for point in trainer.controller.history.evals)
    return [[metrics[WALK_METRIC], metrics[BLOCK_METRIC]] for metrics in points]


@pytest.mark.usefixtures("one_rank")
def test_the_best_checkpoint_is_the_one_with_the_longest_walk(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    best = trainer.persistence.manager.best
    assert best.metric == WALK_METRIC
    assert best.score == max(walk for walk, _ in walks(trainer))


@pytest.mark.usefixtures("one_rank")
def test_an_evaluation_in_training_counts_as_a_replay_afterwards(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    strategy = trainer.strategy
    prompts = [r.walk for batch in eval_loader(strategy, ragged(5, seed=2), 3) for r in replay(strategy, batch, 3)]
    expected = sum(p.accepted for p in prompts) / sum(p.passes for p in prompts)
    assert walks(trainer)[-1][0] == expected


def _train_and_tell(rank: int, folder: Path) -> None:
    found = walks(trained(folder / "two", rank, 2))
    if rank == 0:
        (folder / "walks.json").write_text(json.dumps(found))


def test_two_ranks_walk_as_one_does(tmp_path: Path, one_rank: None) -> None:
    on_ranks(2, tmp_path, _train_and_tell, tmp_path)
    assert json.loads((tmp_path / "walks.json").read_text()) == walks(trained(tmp_path / "one"))
