"""What a training does not go on from: found before its first step, with both values, and nothing is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import contents
from resumable_runs import RecordingStrategy, ResumableRun, changed
from torch import Tensor, nn
from training_toys import ragged_samples

from draftworks.errors import ConfigError, StoreError
from draftworks.training.checkpoint_files import read_record
from draftworks.training.history import History
from draftworks.training.resume import HISTORY
from draftworks.training.snapshot import WEIGHTS, Snapshot, rng_state
from draftworks.training.trainer import Trainer

STEP = 4
IDENTITY = {
    "strategy": "toy",
    "options": {"taps": [1, 2]},
    "training": {"lr": 0.02, "global_batch_size": 8},
    "target": "t" * 8,
    "train": {"tokens": "a" * 8, "features": "b" * 8},
}


class WiderStrategy(RecordingStrategy):
    """Has a parameter more, which its loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.model.more = nn.Parameter(torch.ones(2))


class OtherStrategy(RecordingStrategy):
    """Has a parameter of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.model.offset = nn.Parameter(torch.zeros(2, 6))


class FrozenStrategy(RecordingStrategy):
    """Does not train one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model.offset.requires_grad_(False)


@pytest.fixture
def run(tmp_path: Path, one_rank: None) -> ResumableRun:
    """With a checkpoint after step 4."""
    run = ResumableRun(tmp_path / "run", changed(save_every=0, eval_every=0), identity=IDENTITY)
    run.trainer(stop_after=STEP).fit()
    return run


def checkpoint(run: ResumableRun) -> Path:
    return run.manager().folder.final(STEP)


def altered(run: ResumableRun, **changes: Any) -> ResumableRun:
    return ResumableRun(**{**vars(run), **changes})


@contextmanager
def refused(run: ResumableRun, *message: str, error: type[Exception] = StoreError) -> Iterator[None]:
    """Every part of the message is in the error, and the folder is as it was."""
    before = contents(run.folder.parent)
    with pytest.raises(error) as caught:
        yield
    for part in message:
        assert part in str(caught.value)
    assert contents(run.folder.parent) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "other"}, "strategy: the checkpoint has toy, this training other"),
        ({"options": {"taps": [1, 3]}}, "options.taps: the checkpoint has [1, 2], this training [1, 3]"),
        ({"options": {}}, "options.taps: the checkpoint has [1, 2], this training nothing"),
        ({"target": "u" * 8}, "target: the checkpoint has tttttttt, this training uuuuuuuu"),
        ({"train": {**IDENTITY["train"], "tokens": "c"}}, "train.tokens: the checkpoint has aaaaaaaa, this training c"),
        ({"train": {**IDENTITY["train"], "features": "c"}}, "train.features: the checkpoint has bbbbbbbb, this train"),
        ({"training": {"lr": 0.1, "global_batch_size": 8}}, "training.lr: the checkpoint has 0.02, this training 0.1"),
        ({"training": {"lr": 0.02, "global_batch_size": 16}}, "global_batch_size: the checkpoint has 8, this training 16"),
    ],
)  # fmt: skip
def test_another_training_is_refused_with_both_values(
    run: ResumableRun, change: Mapping[str, Any], message: str
) -> None:
    with refused(run, str(checkpoint(run)), message):
        altered(run, identity={**IDENTITY, **change}).trainer()


def test_everything_that_differs_is_named_at_once(run: ResumableRun) -> None:
    with refused(run, "strategy: the checkpoint has toy", "target: the checkpoint has tttttttt"):
        altered(run, identity={**IDENTITY, "strategy": "other", "target": "u"}).trainer()


@pytest.mark.parametrize(
    ("samples", "global_batch", "message"),
    [
        (31, 8, "position: epoch: the checkpoint has 0, this training 1"),
        (90, 8, "position: samples: the checkpoint has 45, this training 90"),
        (45, 4, "position: epoch_samples: the checkpoint has 32, this training 16"),
    ],
)
def test_position_in_other_data_or_batches_is_refused(
    run: ResumableRun, samples: int, global_batch: int, message: str
) -> None:
    other = altered(run, train=ragged_samples(samples), spec=changed(run.spec, global_batch_size=global_batch))
    with refused(run, message, "would repeat or skip samples"):
        other.trainer()


def test_ranks_that_do_not_divide_the_batch_are_refused(run: ResumableRun) -> None:
    with refused(run, "8 is not a multiple of micro_batch_size 4 x ranks 3 = 12", error=ConfigError):
        run.trainer(rank=0, world=3)


def test_missing_and_unexpected_weights_are_named(run: ResumableRun) -> None:
    with refused(run, WEIGHTS, "missing tensors: ['more']; unexpected tensors: none"):
        altered(run, strategy=WiderStrategy).trainer()
    wider = altered(run, strategy=WiderStrategy, folder=run.folder / "wider")
    wider.trainer(stop_after=STEP).fit()
    with refused(run, WEIGHTS, "missing tensors: none; unexpected tensors: ['more']"):
        altered(wider, strategy=RecordingStrategy).trainer()


def test_weights_of_another_shape_are_refused(run: ResumableRun) -> None:
    with refused(run, "shape of offset: expected (2, 6), found (1, 6)"):
        altered(run, strategy=OtherStrategy).trainer()


def test_optimizer_state_of_a_parameter_that_is_not_trained_is_refused(run: ResumableRun) -> None:
    with refused(run, "optimizer state of parameters that the draft lacks: ['offset']"):
        altered(run, strategy=FrozenStrategy).trainer()


def save_with_moments(run: ResumableRun, trainer: Trainer, moments: Mapping[str, Tensor]) -> None:
    """The checkpoint again, with its counters as they were."""
    state, history = read_record(checkpoint(run)).state, History.load(checkpoint(run) / HISTORY)
    rng, documents = rng_state(torch.device("cpu")), {HISTORY: history.to_json()}
    run.manager().save(Snapshot(state, trainer.weights(), moments, rng, documents), STEP)


def test_missing_moment_is_named(run: ResumableRun) -> None:
    trainer = run.trainer()
    moments = trainer.core.optimizer.moments()
    save_with_moments(run, trainer, {name: m for name, m in moments.items() if name != "offset.exp_avg_sq"})
    with refused(run, "optimizer", "offset.exp_avg_sq"):
        run.trainer()


def test_moment_of_another_shape_is_refused(run: ResumableRun) -> None:
    trainer = run.trainer()
    save_with_moments(run, trainer, {**trainer.core.optimizer.moments(), "offset.exp_avg": torch.zeros(5, 6)})
    with refused(run, "optimizer", "offset.exp_avg", "[5, 6]", "[1, 6]"):
        run.trainer()


@pytest.mark.parametrize("pattern", [WEIGHTS, "optimizer/*.safetensors", "rng/rank0.safetensors", HISTORY])
def test_flipped_byte_is_refused_by_the_name_of_its_file(run: ResumableRun, pattern: str) -> None:
    path = next(checkpoint(run).glob(pattern))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with refused(run, f"{path}: altered"):
        run.trainer()


@pytest.mark.parametrize("pattern", [WEIGHTS, "optimizer/*.safetensors", "rng/rank0.safetensors", HISTORY])
def test_truncated_checkpoint_is_refused_by_name_and_is_not_the_newest(run: ResumableRun, pattern: str) -> None:
    path = next(checkpoint(run).glob(pattern))
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    with refused(run, f"{path}: truncated", f"expected {size + 1} bytes, found {size} bytes"):
        run.trainer(resume_from=checkpoint(run))
    path.unlink()
    with refused(run, f"{path}: cannot be read: No such file"):
        run.trainer(resume_from=checkpoint(run))
    assert run.manager().latest_dir() is None


def _nothing_there(run: ResumableRun) -> Path:
    return run.folder / "nowhere"


def _file(run: ResumableRun) -> Path:
    return checkpoint(run) / WEIGHTS


def _folder_of_checkpoints(run: ResumableRun) -> Path:
    return run.folder


def _unsealed(run: ResumableRun) -> Path:
    folder = shutil.copytree(checkpoint(run), run.folder / "unsealed")
    (folder / "checkpoint.json").unlink()
    return folder


def _damaged_record(run: ResumableRun) -> Path:
    folder = shutil.copytree(checkpoint(run), run.folder / "damaged")
    (folder / "checkpoint.json").write_text('{"step": 4}')
    return folder


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (_nothing_there, "nowhere: expected the folder of a checkpoint, found nothing"),
        (_file, "model.safetensors: expected the folder of a checkpoint, found a file"),
        (_folder_of_checkpoints, "It holds the checkpoints toy-step4: name one of them"),
        (_unsealed, "unsealed: not a complete checkpoint: checkpoint.json is missing"),
        (_damaged_record, "damaged/checkpoint.json: not a checkpoint record"),
    ],
)
def test_path_that_is_no_checkpoint_is_refused(
    run: ResumableRun, place: Callable[[ResumableRun], Path], message: str
) -> None:
    path = place(run)
    with refused(run, message):
        run.trainer(resume_from=path)
