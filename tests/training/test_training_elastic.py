"""A training saved on some ranks goes on, on another number of them and with other micro-batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from resumable_runs import ResumableRun, changed
from safetensors.torch import load_file, save_file

from draftworks.training.history import History

pytestmark = pytest.mark.slow

STOPPED_AFTER = 7
MICRO = {1: 8, 2: 1, 4: 2}
"""By the number of ranks."""
PAIRS = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
SPEC = changed(log_every=1, save_every=0)


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        seen: step and sample, as trained on.
        drawn: the first random numbers after the checkpoint was saved, or read.
    """

    seen: list[list]
    drawn: list[float]

    def save(self, folder: Path, rank: int) -> None:
        (folder / f"report{rank}.json").write_text(json.dumps(asdict(self)))


def reports(folder: Path) -> list[RankReport]:
    return [RankReport(**json.loads(path.read_text())) for path in sorted(folder.glob("report*.json"))]


def samples_seen(folder: Path) -> list[list]:
    return sorted(sample for report in reports(folder) for sample in report.seen)


def drawn_after_seed(seed: int) -> list[float]:
    return torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()


def _first_leg(rank: int, folder: Path, world: int) -> None:
    torch.manual_seed(100 + rank)
    run = ResumableRun(folder / f"from{world}", SPEC, MICRO[world])
    trainer = run.trainer(rank, world, stop_after=STOPPED_AFTER)
    trainer.fit()
    RankReport(trainer.strategy.seen, torch.rand(3).tolist()).save(run.folder, rank)


def _second_leg(rank: int, folder: Path, first: int, world: int) -> None:
    torch.manual_seed(200 + rank)
    run = ResumableRun(folder / f"{first}to{world}", SPEC, MICRO[world])
    if rank == 0:
        shutil.copytree(folder / f"from{first}", run.folder, ignore=shutil.ignore_patterns("report*"))
    if dist.is_initialized():
        dist.barrier()
    trainer = run.trainer(rank, world)
    drawn = torch.rand(3).tolist()
    trainer.fit()
    _keep(trainer.weights(), trainer.controller.history, run.folder, rank)
    RankReport(trainer.strategy.seen, drawn).save(run.folder, rank)


def _first_leg_of_two(rank: int, folder: Path) -> None:
    _first_leg(rank, folder, world=2)


def _both_legs_of_four(rank: int, folder: Path) -> None:
    _first_leg(rank, folder, world=4)
    for first in (1, 2):
        _second_leg(rank, folder, first, world=4)


def _second_legs_of_two(rank: int, folder: Path) -> None:
    for first in (1, 2, 4):
        _second_leg(rank, folder, first, world=2)


def _keep(weights: dict[str, torch.Tensor], history: History, folder: Path, rank: int) -> None:
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        history.save(folder / "history.json")


def _straight(folder: Path) -> None:
    trainer = ResumableRun(folder / "straight", SPEC, micro=4).finished()
    _keep(trainer.weights(), trainer.controller.history, folder / "straight", rank=0)
    RankReport(trainer.strategy.seen, []).save(folder / "straight", rank=0)


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `straight`, `fromN`, and `NtoM` for each of the pairs."""
    folder = tmp_path_factory.mktemp("legs")
    _straight(folder)
    _first_leg(0, folder, world=1)
    for world, work in ((2, _first_leg_of_two), (4, _both_legs_of_four), (2, _second_legs_of_two)):
        on_ranks(world, tmp_path_factory.mktemp("ranks"), work, folder)
    for first in (2, 4):
        _second_leg(0, folder, first, world=1)
    return folder


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_loss_curve_and_weights_are_those_of_the_undisturbed_training(legs: Path, first: int, second: int) -> None:
    found, expected = legs / f"{first}to{second}", legs / "straight"
    weights = load_file(found / "weights.safetensors")
    for name, tensor in load_file(expected / "weights.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    mine, theirs = History.load(found / "history.json"), History.load(expected / "history.json")
    for point, other in zip(mine.train, theirs.train, strict=True):
        assert (point.step, point.tokens, point.lr) == (other.step, other.tokens, other.lr)
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
    for point, other in zip(mine.evals, theirs.evals, strict=True):
        assert (point.step, point.result.metric_sums) == (other.step, other.result.metric_sums)
        assert point.result.avg_loss == pytest.approx(other.result.avg_loss, rel=1e-5)
    assert [(session.start_step, session.world_size) for session in mine.sessions] == [
        (0, first), (STOPPED_AFTER, second),
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_sample_is_trained_on_once_at_its_step(legs: Path, first: int, second: int) -> None:
    before, after = samples_seen(legs / f"from{first}"), samples_seen(legs / f"{first}to{second}")
    assert sorted(before + after) == samples_seen(legs / "straight")
    assert {step for step, _ in before} == set(range(STOPPED_AFTER))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_generators_are_restored_on_as_many_ranks_only(legs: Path, first: int, second: int) -> None:
    found = [report.drawn for report in reports(legs / f"{first}to{second}")]
    if first == second:
        assert found == [report.drawn for report in reports(legs / f"from{first}")]
    else:
        assert found == [drawn_after_seed(200 + rank) for rank in range(second)]
