"""Where a checkpoint stands counts samples of the population, since that decides the order of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.errors import StoreError
from draftworks.training.resume import TrainingProgress

HERE = Path("checkpoint")


def test_a_checkpoint_of_a_complete_set_is_read_by_a_training_that_leaves_samples_out_of_it():
    stored = TrainingProgress(13, 4, global_step=2).to_json()
    assert stored == {"global_step": 2, "epoch": 0, "epoch_samples": 8, "samples": 13, "global_batch_size": 4}
    assert TrainingProgress(12, 4, left_out=1).from_json(stored, HERE).global_step == 2


@pytest.mark.parametrize(
    "other", [TrainingProgress(12, 4), TrainingProgress(13, 4, left_out=1), TrainingProgress(11, 4, left_out=2)]
)
def test_a_checkpoint_of_another_order_is_refused(other: TrainingProgress):
    stored = TrainingProgress(13, 4, global_step=3).to_json()
    with pytest.raises(StoreError, match="would repeat or skip samples"):
        other.from_json(stored, HERE)
