"""Collation shared by all strategies: samples to a padded batch, one batch row each, or to one packed row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from draftworks.errors import DataError


@dataclass(frozen=True)
class BatchLayout:
    """Where the tokens of each sample go in a batch.

    Attributes:
        shape: (B, S) of the batch.
        slots: batch row and slice of positions of every sample.
        documents: see `TrainBatch`.
    """

    shape: tuple[int, int]
    slots: tuple[tuple[int, slice], ...]
    documents: tuple[int, ...] = ()

    @classmethod
    def padded(cls, lengths: Sequence[int]) -> BatchLayout:
        """One batch row for each sample, filled up on the right to the longest."""
        slots = tuple((row, slice(length)) for row, length in enumerate(lengths))
        return cls((len(lengths), max(lengths)), slots)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> BatchLayout:
        """One batch row, the samples directly one after the other."""
        ends = list(accumulate(lengths))
        slots = tuple((0, slice(end - length, end)) for end, length in zip(ends, lengths))
        return cls((1, ends[-1]), slots, tuple(lengths))

    def lay_out(self, tensors: Iterable[Tensor]) -> Tensor:
        """Copy each sample's (S_i, …) to its slot of one (B, S, …) tensor, zeros elsewhere."""
        tensors = list(tensors)
        batch = tensors[0].new_zeros((*self.shape, *tensors[0].shape[1:]))
        for slot, tensor in zip(self.slots, tensors, strict=True):
            batch[slot] = tensor
        return batch


def sample_lengths(samples: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the number of tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


def collate_features(
    samples: Sequence[Mapping[str, Tensor]],
    sample_ids: Sequence[str],
    features: Sequence[str],
    width: int,
    layout: BatchLayout | None = None,
) -> dict[str, Tensor]:
    """Collate tokens, loss masks and the features side by side; padding is token 0, mask off and features 0.

    Args:
        samples: each has `input_ids` (S,) int64, `loss_mask` (S,) and every feature (S, width).
        layout: default padded.

    Returns:
        `input_ids` (B, S) int64, `loss_mask` (B, S) bool, and `features` (B, S, n · width).

    Raises:
        DataError: a feature has another shape.
    """
    layout = layout or BatchLayout.padded(sample_lengths(samples))
    beside = torch.zeros((*layout.shape, len(features) * width), dtype=samples[0][features[0]].dtype)
    for slot, sample, name in zip(layout.slots, samples, sample_ids, strict=True):
        check_features(sample, features, width, name)
        torch.cat([sample[feature] for feature in features], dim=-1, out=beside[slot])  # (S_i, n · width)
    return {
        "input_ids": layout.lay_out(sample["input_ids"].long() for sample in samples),
        "loss_mask": layout.lay_out(sample["loss_mask"].bool() for sample in samples),
        "features": beside,
    }


def collate_feature(
    samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], feature: str, width: int, layout: BatchLayout
) -> Tensor:
    """Collate one feature by itself, (B, S, width).

    Raises:
        DataError: it has another shape.
    """
    for sample, name in zip(samples, sample_ids, strict=True):
        check_features(sample, (feature,), width, name)
    return layout.lay_out(sample[feature] for sample in samples)


def collate_with_last(
    samples: Sequence[Mapping[str, Tensor]],
    sample_ids: Sequence[str],
    features: Sequence[str],
    width: int,
    layout: BatchLayout,
) -> dict[str, Tensor]:
    """Collate as `collate_features`, but the last feature, the target's last hidden states, as `last` (B, S, width)."""
    *taps, last = features
    batch = collate_features(samples, sample_ids, taps, width, layout)
    return {**batch, "last": collate_feature(samples, sample_ids, last, width, layout)}


def mask_last_positions(batch: Mapping[str, Tensor], layout: BatchLayout) -> dict[str, Tensor]:
    """Turn off the last position of every sample in `loss_mask`; the mask as it was is kept as `answer_mask`."""
    loss_mask = batch["loss_mask"].clone()
    for row, positions in layout.slots:
        loss_mask[row, positions.stop - 1] = False
    return {**batch, "loss_mask": loss_mask, "answer_mask": batch["loss_mask"]}


def check_features(sample: Mapping[str, Tensor], features: Sequence[str], width: int, name: str) -> None:
    """Raise DataError if a feature does not have `width` values for every token."""
    expected = (len(sample["input_ids"]), width)
    for feature in features:
        found = tuple(sample[feature].shape)
        if found != expected:
            raise DataError(f"sample {name}: feature {feature}: expected shape {expected}, found {found}")
