"""Checkpoints of other software: whole, from their folder alone, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftworks.errors import StoreError
from draftworks.export.checkpoint_files import CONFIG, INDEX, WEIGHTS, read_checkpoint


def save_shard(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(2) for name in names}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / CONFIG).write_text("{}")
    return tmp_path / "draft"


def write_index(folder: Path, **shard_of: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": shard_of}))


def test_shards_are_read_as_one_file_is(folder: Path):
    save_shard(folder / WEIGHTS, "a", "b")
    whole = read_checkpoint(folder).tensors
    (folder / WEIGHTS).unlink()
    save_shard(folder / "1.safetensors", "a")
    save_shard(folder / "2.safetensors", "b")
    write_index(folder, a="1.safetensors", b="2.safetensors")
    assert read_checkpoint(folder).tensors.keys() == whole.keys()


@pytest.mark.parametrize("shard", ["../1.safetensors", "inner/1.safetensors", "{}/1.safetensors", "1.safetensors\0"])
def test_an_index_names_files_of_its_own_folder_only(folder: Path, shard: str):
    for place in (folder, folder.parent, folder / "inner"):
        save_shard(place / "1.safetensors", "a")
    write_index(folder, a=shard.format(folder))
    with pytest.raises(StoreError, match="is not the name of a file in this folder"):
        read_checkpoint(folder)


def test_an_index_and_its_files_hold_the_same_tensors(folder: Path):
    save_shard(folder / "1.safetensors", "a")
    write_index(folder, a="1.safetensors", b="1.safetensors")
    with pytest.raises(StoreError, match="do not hold the same tensors"):
        read_checkpoint(folder)
