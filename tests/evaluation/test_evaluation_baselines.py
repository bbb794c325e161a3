"""The bigram baseline: a small example by hand, and comparison with a slow reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.strategy import StepContext
from draftworks.errors import DataError
from draftworks.evaluation.baselines import BigramDraft, BigramTable
from draftworks.evaluation.evaluator import Evaluator
from draftworks.features.contracts import TrainBatch

VOCAB = 6


def tokenized(folder: Path, *samples: tuple[list[int], list[int]]) -> TokenizedSet:
    """Samples of ids and masks."""
    rows = [
        TokenRow(f"s{index}", np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))
        for index, (ids, mask) in enumerate(samples)
    ]
    write_tokens(folder, rows)
    return TokenizedSet.open(folder)


def test_table_counts_supervised_successors(tmp_path: Path) -> None:
    tokens = tokenized(
        tmp_path,
        ([0, 1, 2, 1, 2, 1, 3], [0, 0, 1, 1, 1, 1, 1]),
        ([3, 5, 5], [1, 0, 1]),
    )
    # 0 -> 1 is not supervised, 3 -> 3 would cross samples: both fall back to 1, the lowest of the most frequent 1, 2, 3.
    assert BigramTable.count(tokens, VOCAB).successor.tolist() == [1, 2, 1, 1, 1, 5]


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    tokens = tokenized(tmp_path, ([0, 4, 0, 3], [0, 1, 0, 1]))
    assert BigramTable.count(tokens, VOCAB).successor[0] == 3


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="belongs to another target"):
        BigramTable.count(tokenized(tmp_path, ([0, 9], [0, 1])), VOCAB)


def example_batch(ids: list[list[int]], mask: list[list[int]], argmax: list[list[int]]) -> TrainBatch:
    """Return a batch whose target argmax at each position is `argmax`, with the identity as head."""
    last = torch.nn.functional.one_hot(torch.tensor(argmax), VOCAB).float()
    tensors = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask).bool(), "last": last}
    return TrainBatch(tensors, ("s",), 0)


def test_hand_made_example() -> None:
    table = BigramTable(np.array([1, 2, 3, 4, 5, 0]))
    draft = BigramDraft(table, torch.eye(VOCAB), partial(token_mean_label_mask, steps=2))
    #            position  0  1  2  3  4
    batch = example_batch([[0, 1, 2, 3, 3]], [[0, 1, 1, 1, 1]], [[1, 2, 3, 0, 0]])
    # Step 0: rows 0, 1, 2 propose after tokens 1, 2, 3 (positions 1 to 3): 2 ok, 3 ok, 4 where the target says 0.
    # Step 1: rows 0, 1 propose after positions 2 and 3.
    result = Evaluator().run(draft, [batch])
    assert result.metric_sums == {"acc_corrects": (2.0, 1.0), "acc_denoms": (3.0, 2.0)}
    assert result.avg_loss is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_counts_are_those_of_the_definition(seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids, argmax = torch.randint(0, VOCAB, (2, 2, 9), generator=generator)
    mask = torch.rand(2, 9, generator=generator) < 0.7
    table = torch.randint(0, VOCAB, (VOCAB,), generator=generator)
    draft = BigramDraft(BigramTable(table.numpy()), torch.eye(VOCAB), partial(token_mean_label_mask, steps=steps))
    output = draft(example_batch(ids.tolist(), mask.int().tolist(), argmax.tolist()), StepContext(training=False))
    for step in range(steps):
        supervised = correct = 0
        for row in range(2):
            for t in range(9 - 2 - step):
                if mask[row, t + 1 : t + 3 + step].all():
                    supervised += 1
                    correct += int(table[ids[row, t + 1 + step]] == argmax[row, t + 1 + step])
        assert output.metric_sums["acc_denoms"][step] == supervised
        assert output.metric_sums["acc_corrects"][step] == correct
