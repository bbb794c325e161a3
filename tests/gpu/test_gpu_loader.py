"""Batches that are read ahead reach a device as they were, and of a GPU's the memory is pinned."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_cases import made_up_draft, made_up_target
from gpu_toys import SHAPE, TrainingFolder

from draftworks.config.registry_files import TrainingSpec
from draftworks.features.loader import FeatureDataLoader


def test_batches_reach_the_device_as_they_were(device: torch.device, tmp_path: Path) -> None:
    strategy = made_up_draft("dflash", SHAPE, made_up_target(SHAPE))
    refs, store = TrainingFolder(tmp_path, "dflash", device, TrainingSpec()).stored(strategy)
    plain = list(FeatureDataLoader.for_evaluation(refs, store, 2, strategy.collate, prefetch=0))
    ahead = FeatureDataLoader.for_evaluation(refs, store, 2, strategy.collate, prefetch=2)
    ahead.prepare_for(device)
    for batch, expected in zip(ahead, plain, strict=True):
        there = batch.to(device)
        for name, tensor in expected.tensors.items():
            assert batch[name].is_pinned() == (device.type == "cuda")
            assert there[name].device.type == device.type
            assert torch.equal(there[name].cpu(), tensor)
