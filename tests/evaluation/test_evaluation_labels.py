"""Label agreement, by hand, with a head that reads the token off the hidden state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from torch import Tensor

from draftworks.evaluation.evaluator import collate_labels, measure_label_agreement
from draftworks.features.contracts import TrainBatch

HEAD = torch.eye(8)
CPU = torch.device("cpu")


def sample(ids: list[int], answered_from: int, said: list[int]) -> dict[str, Tensor]:
    """Return a sample; `said` are the target's greedy tokens after each token."""
    mask = torch.arange(len(ids)) >= answered_from
    return {"input_ids": torch.tensor(ids), "loss_mask": mask, "last": HEAD[torch.tensor(said)]}


RIGHT_TWICE_OF_THREE = sample([1, 2, 3, 4, 5], 2, said=[0, 3, 4, 0, 0])
RIGHT_ONCE_OF_ONE = sample([1, 7], 1, said=[7, 0])


def batch(*samples: dict[str, Tensor]) -> TrainBatch:
    return collate_labels(samples, [str(index) for index in range(len(samples))])


def test_tokens_of_answers_are_counted_not_samples() -> None:
    assert measure_label_agreement([batch(RIGHT_TWICE_OF_THREE, RIGHT_ONCE_OF_ONE)], HEAD, CPU) == 3 / 4
    assert measure_label_agreement([batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)], HEAD, CPU) == 3 / 4


@pytest.mark.parametrize("answered_from", [0, 1])
def test_first_token_of_a_sample_was_said_by_nobody(answered_from: int) -> None:
    assert measure_label_agreement([batch(sample([1, 7], answered_from, said=[7, 0]))], HEAD, CPU) == 1.0


def test_nothing_to_agree_on_is_no_agreement() -> None:
    silent = {**RIGHT_ONCE_OF_ONE, "loss_mask": torch.zeros(2, dtype=torch.bool)}
    assert measure_label_agreement([batch(silent)], HEAD, CPU) == 0.0
    assert measure_label_agreement([], HEAD, CPU) == 0.0


def _with_unequal_shares(rank: int) -> None:
    mine = [batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)] if rank == 1 else []
    assert measure_label_agreement(mine, HEAD, CPU) == 3 / 4


def test_ranks_with_unequal_shares_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _with_unequal_shares)
