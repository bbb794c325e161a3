"""Label agreement, by hand, with a head that reads the token off the hidden state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from torch import Tensor

from draftworks.evaluation.evaluator import collate_labels, count_labels
from draftworks.evaluation.labels import Exactness, LabelCounts, judge_exactness
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
    assert count_labels([batch(RIGHT_TWICE_OF_THREE, RIGHT_ONCE_OF_ONE)], HEAD, CPU).agreement == 3 / 4
    assert count_labels([batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)], HEAD, CPU).agreement == 3 / 4


@pytest.mark.parametrize("answered_from", [0, 1])
def test_first_token_of_a_sample_was_said_by_nobody(answered_from: int) -> None:
    assert count_labels([batch(sample([1, 7], answered_from, said=[7, 0]))], HEAD, CPU).agreement == 1.0


def test_nothing_to_agree_on_is_no_agreement() -> None:
    silent = {**RIGHT_ONCE_OF_ONE, "loss_mask": torch.zeros(2, dtype=torch.bool)}
    assert count_labels([batch(silent)], HEAD, CPU).agreement == 0.0
    assert count_labels([], HEAD, CPU).agreement == 0.0


@pytest.mark.parametrize(
    ("label_logit", "near"), [(63.0, 1), (62.9, 0), (-64.0, 0)], ids=["two steps of bfloat16", "more", "another sign"]
)
def test_a_near_tie_is_a_gap_of_two_steps_of_bfloat16(label_logit: float, near: int) -> None:
    last = torch.zeros(2, 8)
    last[0, 3], last[0, 7] = 64.0, label_logit
    one = {"input_ids": torch.tensor([1, 7]), "loss_mask": torch.tensor([False, True]), "last": last}
    found = count_labels([batch(one), batch(RIGHT_TWICE_OF_THREE)], HEAD, CPU)
    assert found == LabelCounts(tokens=4, differing=2, near_ties=near)


@pytest.mark.parametrize(
    ("counts", "greedy", "found"),
    [
        (None, True, Exactness.UNKNOWN),
        (LabelCounts(1000, 0, 0), None, Exactness.EXACT),
        (LabelCounts(1000, 2, 2), True, Exactness.ROUNDING),
        (LabelCounts(1000, 10, 0), True, Exactness.ROUNDING),
        (LabelCounts(1000, 11, 0), True, Exactness.UNEXPLAINED),
        (LabelCounts(1000, 400, 400), True, Exactness.ROUNDING),
        (LabelCounts(1000, 2, 2), False, Exactness.OTHER_ANSWERS),
        (LabelCounts(1000, 2, 2), None, Exactness.OTHER_ANSWERS),
    ],
)
def test_only_the_targets_own_greedy_answers_differ_by_rounding(counts, greedy, found: Exactness) -> None:
    agreement = None if counts is None else counts.agreement
    assert judge_exactness(agreement, counts, greedy) is found


def test_a_report_from_before_labels_were_counted_is_not_taken_for_rounding() -> None:
    assert judge_exactness(0.998, None, True) is Exactness.OTHER_ANSWERS


def _with_unequal_shares(rank: int) -> None:
    mine = [batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)] if rank == 1 else []
    assert count_labels(mine, HEAD, CPU).agreement == 3 / 4


def test_ranks_with_unequal_shares_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _with_unequal_shares)
