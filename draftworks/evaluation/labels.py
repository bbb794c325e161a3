"""Whether the answers of an eval set are what its target would say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from draftworks.distributed.collectives import sum_over_ranks
from draftworks.drafts.first_choices import argmax_of_head
from draftworks.features.contracts import TrainBatch


def collate_labels(samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
    """The answers' tokens, one after the other, and the hidden states that foretell them: for any strategy alike.

    Args:
        samples: `input_ids` (S,) int64, `loss_mask` (S,) bool, `last` (S, H), after the target's final norm.

    Returns:
        `labels` (N,) and `last` (N, H), of N answer tokens.
    """
    answers = [sample["loss_mask"][1:].bool() for sample in samples]
    labels = [sample["input_ids"][1:][mask] for sample, mask in zip(samples, answers)]
    last = [sample["last"][:-1][mask] for sample, mask in zip(samples, answers)]
    tensors = {"labels": torch.cat(labels), "last": torch.cat(last)}
    return TrainBatch(tensors, tuple(sample_ids), sum(len(sample["input_ids"]) for sample in samples))


def label_agreement(batches: Iterable[TrainBatch], head: Tensor, device: torch.device) -> float:
    """Share of answer tokens that are the target's own argmax where it said them. A collective.

    The replay is exact serving only where it is 1: the answers must be the target's greedy ones.

    Args:
        batches: as `collate_labels` makes them.
        head: (V, H), the target's, on `device`.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        said = argmax_of_head(head, batch["last"].to(device)).cpu()
        counts += torch.tensor([(said == batch["labels"]).sum(), len(said)], dtype=torch.float64)
    agreed, total = sum_over_ranks(counts).tolist()
    return agreed / total if total else 0.0
