"""A draft on disk loads into the same draft and into nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftworks.drafts.draft_io import CONFIG, WEIGHTS, load_draft, read_draft_config, save_draft
from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.errors import StoreError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.eagle3.options import Eagle3Options

TARGET = "0123456789abcdef"


class Small(DraftStrategy):
    """A linear layer, a persistent and a non-persistent buffer, under the name and options of a strategy that is known."""

    name = "eagle3"
    feature_names = ()

    def __init__(self, options: dict[str, Any] | None = None, width: int = 3) -> None:
        self.options = Eagle3Options(**(options or {"layer_ids": [1, 2]}))
        self.model = nn.Linear(width, 2)
        self.model.register_buffer("d2t", torch.arange(2))
        self.model.register_buffer("embedding", torch.zeros(5), persistent=False)

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        raise NotImplementedError

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        raise NotImplementedError

    def propose(self, batch: TrainBatch, position_mask: torch.Tensor, count: int) -> torch.Tensor:
        raise NotImplementedError

    def drafter(self) -> Drafter:
        raise NotImplementedError

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return ()

    def config(self) -> dict[str, Any]:
        return {"options": self.options.to_identity()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_draft(tmp_path, Small(), TARGET, provenance={"steps": 3})
    return tmp_path


def test_round_trip(tmp_path: Path) -> None:
    draft, other = Small(), Small()
    save_draft(tmp_path, draft, TARGET, provenance={"steps": 3})
    config = load_draft(tmp_path, other, TARGET)
    assert config == read_draft_config(tmp_path)
    assert (config.strategy, config.target_digest, config.provenance) == ("eagle3", TARGET, {"steps": 3})
    for name, tensor in draft.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor)


def test_weights_are_fp32_and_without_the_targets_tensors(tmp_path: Path) -> None:
    draft = Small()
    draft.model.bfloat16()
    save_draft(tmp_path, draft, TARGET)
    tensors = load_file(tmp_path / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weight": torch.float32,
        "bias": torch.float32,
        "d2t": torch.int64,
    }


def test_given_weights_are_saved_instead_of_the_models(tmp_path: Path) -> None:
    draft, other = Small(), Small()
    save_draft(tmp_path, draft, TARGET, weights=other.model.state_dict())
    load_draft(tmp_path, draft, TARGET)
    assert torch.equal(draft.model.weight, other.model.weight)


def _edit_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | changes))


def _edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors, and the digest with them, so that the tensors themselves are what is wrong."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    from draftworks.storage.identity import file_digest

    _edit_config(folder, weights_digest=file_digest(folder / WEIGHTS))


def assert_refused(folder: Path, message: str, draft: Small | None = None, target: str = TARGET) -> None:
    """Refused with that message, and the model is as it was."""
    draft = draft or Small()
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    with pytest.raises(StoreError, match=message):
        load_draft(folder, draft, target)
    for name, tensor in draft.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_another_strategy_is_refused(saved: Path) -> None:
    _edit_config(saved, strategy="other")
    assert_refused(saved, r"config\.json: strategy: expected eagle3, found other")


def test_another_target_is_refused(saved: Path) -> None:
    assert_refused(saved, f"target digest: expected ffff, found {TARGET}", target="ffff")


def test_other_options_are_refused_with_both_values(saved: Path) -> None:
    assert_refused(saved, r"draft\.options: expected .*\[9\].*, found .*\[1, 2\]", Small({"layer_ids": [9]}))


def _edit_options(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    draft = json.loads((folder / CONFIG).read_text())["draft"]
    edit(draft["options"])
    _edit_config(folder, draft=draft)


def test_a_draft_outlives_options_that_came_after_it(saved: Path) -> None:
    _edit_options(saved, lambda options: options.pop("step_decay"))
    load_draft(saved, Small(), TARGET)
    assert_refused(saved, r"draft\.options: expected", Small({"layer_ids": [1, 2], "step_decay": 0.5}))


def test_options_that_are_not_known_any_more_are_named(saved: Path) -> None:
    _edit_options(saved, lambda options: options.update(layers_ids=[1]))
    assert_refused(saved, r"config\.json: options.*layers_ids.*Train the draft again")


def test_missing_and_unexpected_tensors_are_named(saved: Path) -> None:
    _edit_weights(saved, lambda tensors: tensors.update(extra=tensors.pop("bias")))
    assert_refused(saved, r"missing tensors: \['bias'\]; unexpected tensors: \['extra'\]")


def test_another_shape_is_refused(saved: Path) -> None:
    _edit_weights(saved, lambda tensors: tensors.update(bias=torch.zeros(7)))
    assert_refused(saved, r"shape of bias: expected \(2,\), found \(7,\)")


def test_altered_weights_are_refused(saved: Path) -> None:
    content = bytearray((saved / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (saved / WEIGHTS).write_bytes(content)
    assert_refused(saved, r"model\.safetensors: altered: expected digest")


def test_truncated_weights_are_refused(saved: Path) -> None:
    content = (saved / WEIGHTS).read_bytes()[:-4]
    (saved / WEIGHTS).write_bytes(content)
    assert_refused(saved, r"model\.safetensors")


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert_refused(saved, name.replace(".", r"\."))


@pytest.mark.parametrize("content", ["{", "{}", '{"strategy": "small", "nonsense": 1}'])
def test_damaged_config_is_refused(saved: Path, content: str) -> None:
    (saved / CONFIG).write_text(content)
    assert_refused(saved, r"config\.json: not the config of a draft")


def test_newer_schema_is_refused(saved: Path) -> None:
    _edit_config(saved, schema_version=2)
    assert_refused(saved, "schema 2, expected 1")
