"""Padding samples to a batch: the part that all strategies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftworks.errors import DataError


def collate_features(
    samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], features: Sequence[str], width: int
) -> dict[str, Tensor]:
    """Right-pad with token 0, mask off and features 0.

    Args:
        samples: each has `input_ids` (S,) int64, `loss_mask` (S,) and every feature (S, width).

    Returns:
        `input_ids` (B, S) int64, `loss_mask` (B, S) bool, and the features side by side as `features` (B, S, n · width).

    Raises:
        DataError: a feature of another shape.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    shape = (len(samples), max(lengths))
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "features": torch.zeros((*shape, len(features) * width), dtype=samples[0][features[0]].dtype),
    }
    for row, (sample, length, name) in enumerate(zip(samples, lengths, sample_ids, strict=True)):
        check_features(sample, features, (length, width), name)
        batch["input_ids"][row, :length] = sample["input_ids"]
        batch["loss_mask"][row, :length] = sample["loss_mask"].bool()
        torch.cat([sample[feature] for feature in features], dim=-1, out=batch["features"][row, :length])
    return batch


def check_features(sample: Mapping[str, Tensor], features: Sequence[str], expected: tuple[int, int], name: str) -> None:
    """DataError for a feature that is not of the `expected` shape."""
    for feature in features:
        found = tuple(sample[feature].shape)
        if found != expected:
            raise DataError(f"sample {name}: feature {feature}: expected shape {expected}, found {found}")
