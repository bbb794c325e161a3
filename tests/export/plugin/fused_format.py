"""The parts of the plug-in that need torch: the draft, its export format, and the format's reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from fused import FUSED
from torch import Tensor

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.readers.reader import ExportFolder, ExportReader, TargetTensors, read_taps
from draftworks.strategies.eagle3.export_speculators import SpeculatorsEagle3
from draftworks.strategies.eagle3.reader import read_speculators_eagle3
from draftworks.strategies.eagle3.strategy import Eagle3Strategy

KIND, LAYER_IDS = "speculators_model_type", "eagle_aux_hidden_state_layer_ids"
OURS, THEIRS = "fc.weight", "fuse.weight"
Value = TypeVar("Value")


class FusedStrategy(Eagle3Strategy):
    name = FUSED.name


class FusedFormat(SpeculatorsEagle3):
    name = "fused"
    strategy = FUSED.name

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return _renamed(super().build_tensors(draft), OURS, THEIRS)

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        return _renamed(super().list_expected_tensors(shape), OURS, THEIRS)

    def to_canonical_name(self, name: str) -> str:
        return OURS if name == THEIRS else super().to_canonical_name(name)

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        return super().build_config(draft, dtype) | {KIND: self.name}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get(KIND) == self.name


def read_fused(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> ExportReader:
    taps = [tap.hf_index for tap in read_taps(folder, FusedFormat.name, LAYER_IDS)]
    config = {**folder.config, KIND: "eagle3", LAYER_IDS: taps}
    relative = replace(folder, config=config, tensors=_renamed(folder.tensors, THEIRS, OURS))
    return read_speculators_eagle3(relative, target, dtype)


def _renamed(values: Mapping[str, Value], old: str, new: str) -> dict[str, Value]:
    return {new if name == old else name: value for name, value in values.items()}
