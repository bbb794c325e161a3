"""The target's argmaxes that a training finds once: the same for every way in which a sample is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftworks.drafts.documents import BatchLayout, Documents
from draftworks.drafts.objectives import make_teacher_plan, token_mean_label_mask
from draftworks.drafts.target_labels import TargetLabels
from draftworks.features.contracts import TrainBatch

HIDDEN, VOCAB, STEPS = 4, 9, 3
MASKS = {"a": [0, 1, 1, 1, 0, 0, 1, 1], "b": [0, 0, 1, 1, 1], "c": [0, 0, 0], "d": [1, 1, 1, 1, 1, 1]}
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
STATES = {
    name: torch.randn(len(mask), HIDDEN, generator=torch.Generator().manual_seed(2 + place))
    for place, (name, mask) in enumerate(MASKS.items())
}


def batch_of(names: str, layout: str) -> tuple[TrainBatch, Tensor]:
    """A batch of some samples, and its label mask."""
    arrange = BatchLayout.packed if layout == "packed" else BatchLayout.padded
    where = arrange([len(MASKS[name]) for name in names])
    tensors = {
        "last": where.lay_out(STATES[name] for name in names),
        "loss_mask": where.lay_out(torch.tensor(MASKS[name], dtype=torch.bool) for name in names),
    }
    tensors["input_ids"] = torch.zeros(where.shape, dtype=torch.int64)
    batch = TrainBatch(tensors, tuple(names), documents=where.documents)
    return batch, token_mean_label_mask(batch["loss_mask"], STEPS, Documents.of(batch))


@pytest.mark.parametrize("kept_bytes", [0, 16, 1 << 20], ids=["none kept", "some kept", "all kept"])
def test_labels_are_the_targets_argmaxes_however_samples_are_read(kept_bytes: int) -> None:
    labels = TargetLabels(kept_bytes)
    for names, layout in (("ab", "padded"), ("dca", "packed"), ("c", "packed"), ("bdac", "padded"), ("abcd", "packed")):
        batch, label_mask = batch_of(names, layout)
        asked = make_teacher_plan(label_mask).teacher_positions
        found = labels.find(batch, label_mask, HEAD)[asked]
        assert torch.equal(found, (batch["last"].flatten(0, 1)[asked] @ HEAD.T).argmax(-1))


def test_what_was_found_once_needs_the_head_no_more() -> None:
    labels, (batch, label_mask) = TargetLabels(), batch_of("abd", "padded")
    first = labels.find(batch, label_mask, HEAD)
    assert torch.equal(labels.find(batch, label_mask, torch.zeros_like(HEAD)), first)


def test_a_near_tie_falls_the_same_way_whatever_is_read_beside_it() -> None:
    """In bfloat16 products of more rows may be summed in another order; here many logits differ in their last bit."""
    generator = torch.Generator().manual_seed(7)
    head = (1 + 1e-3 * torch.randn(64, 32, generator=generator)).bfloat16()
    states = {name: torch.randn(40, 32, generator=generator).bfloat16() for name in "abcdefgh"}
    mask = torch.ones(40, dtype=torch.bool)

    def find(names: str) -> dict[str, Tensor]:
        layout = BatchLayout.packed([40] * len(names))
        last, loss_mask = layout.lay_out(states[each] for each in names), layout.lay_out([mask] * len(names))
        tensors = {"last": last, "loss_mask": loss_mask, "input_ids": torch.zeros_like(loss_mask, dtype=torch.int64)}
        batch = TrainBatch(tensors, tuple(names), documents=layout.documents)
        label_mask = token_mean_label_mask(loss_mask, STEPS, Documents.of(batch))
        found = TargetLabels().find(batch, label_mask, head)
        return dict(zip(names, found.split(40), strict=True))

    together = find("abcdefgh")
    assert all(torch.equal(find(name)[name], together[name]) for name in together)


def test_a_rank_without_a_sample_has_no_labels() -> None:
    tensors = {"last": torch.zeros(1, 2, HIDDEN), "input_ids": torch.zeros(1, 2, dtype=torch.int64)}
    batch = TrainBatch(tensors, (), documents=(2,))
    assert not TargetLabels().find(batch, torch.zeros(STEPS, 1, 2, dtype=torch.bool), HEAD).any()
