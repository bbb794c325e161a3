"""Headers of safetensors files, local or on the hub: truncated, wrong or absent ones are reported; weights are not read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.targets.safetensors_headers import INDEX, WEIGHTS, TensorHeader, read_header, read_model_headers
from draftworks.targets.weights import check_target_weights

COMMIT = "a" * 40


def written(path: Path, header: object, nbytes: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_header_is_names_dtypes_and_shapes(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(2, 3, dtype=torch.bfloat16), "y": torch.zeros(())}, path, metadata={"format": "pt"})
    assert read_header(path) == {
        "x": TensorHeader("BF16", (2, 3), "a.safetensors"),
        "y": TensorHeader("F32", (), "a.safetensors"),
    }


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, tiny_folder: Path):
    whole = (tiny_folder / WEIGHTS).read_bytes()
    path = tmp_path / WEIGHTS
    for length in (0, 7, 8, 100, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match=rf"{WEIGHTS}: not a readable safetensors file"):
            read_header(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(StoreError, match="describes .* bytes of tensors, the file has"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        ([], 0),
        (b"[" * 100_000, 0),
        ({"x": []}, 0),
        ({"x": {"dtype": "F32"}}, 0),
        ({"x": entry([2], 0, 4)}, 4),
        ({"x": entry([-1], 0, 4)}, 4),
        ({"x": entry([1], 4, 0)}, 4),
        ({"x": entry(["1"], 0, 4)}, 4),
        ({"x": entry([10**30], 0, 4)}, 4),
        ({"x": entry([1], 0, 4), "y": entry([1], 0, 4)}, 4),
        ({"x": entry([1], 0, 4), "y": entry([1], 8, 12)}, 12),
        ({"x": {**entry([1], 0, 4), "dtype": ["F32"]}}, 4),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: object, nbytes: int):
    with pytest.raises(StoreError, match="not a readable safetensors file"):
        read_header(written(tmp_path / WEIGHTS, header, nbytes))


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path):
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", 10**15) + b"{}")
    with pytest.raises(StoreError, match=f"give a header length of {10**15}"):
        read_header(tmp_path / WEIGHTS)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', '{"weight_map": {"x": "../y"}}']
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, tiny_target: TargetFiles, text: str):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(StoreError, match="not a safetensors index"):
        read_model_headers(tiny_target.model_copy(update={"model": str(tmp_path)}))


def test_tensors_that_are_not_where_the_index_says_are_named(tmp_path: Path, tiny_target: TargetFiles):
    target = tiny_target.model_copy(update={"model": str(tmp_path)})
    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "b.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(
        StoreError, match=r"1 tensors are in files that do not have them, among them a in b\.safetensors"
    ):
        read_model_headers(target)
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(StoreError, match=r"the tensor b is in a\.safetensors and in b\.safetensors: expected one file"):
        read_model_headers(target)


@pytest.mark.parametrize("left", [False, True], ids=["all shards gone", "one shard left"])
def test_removing_the_stale_index_beside_a_whole_file_is_enough(tmp_path: Path, tiny_target: TargetFiles, left: bool):
    target = tiny_target.model_copy(update={"model": str(tmp_path)})
    whole = {"a": torch.zeros(1), "b": torch.zeros(1)}
    save_file(whole, tmp_path / WEIGHTS)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    if left:
        save_file({"a": whole["a"]}, tmp_path / "one.safetensors")
    with pytest.raises(StoreError, match=f"{WEIGHTS} has all of its tensors: remove {INDEX}") as refusal:
        read_model_headers(target)
    assert (", and one.safetensors" in str(refusal.value)) == left
    (tmp_path / INDEX).unlink()
    assert set(read_model_headers(target).tensors) == {"a", "b"}
    index["weight_map"]["c"] = "two.safetensors"  # which the whole file lacks
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(StoreError, match=r"Copy or download the model again, all of its files"):
        read_model_headers(target)


def test_a_folder_without_weights_says_so(tmp_path: Path, tiny_target: TargetFiles):
    with pytest.raises(StoreError, match=f"expected {WEIGHTS} or {INDEX}, found neither"):
        read_model_headers(tiny_target.model_copy(update={"model": str(tmp_path)}))


@pytest.fixture
def hub(tmp_path: Path, tiny_target: TargetFiles, tiny_folder: Path, monkeypatch) -> SimpleNamespace:
    """A cache of the hub with the config of `tiny` at a commit, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_folder / "config.json", snapshot)
    update = {"model": "some/model", "revision": COMMIT, "tokenizer": "some/model", "tokenizer_revision": COMMIT}
    return SimpleNamespace(target=tiny_target.model_copy(update=update), snapshot=snapshot)


def test_a_model_in_the_cache_of_the_hub_needs_no_network(hub, tiny_folder: Path):
    shutil.copy(tiny_folder / WEIGHTS, hub.snapshot)
    assert check_target_weights(hub.target).tensors == 74


def test_weights_that_are_nowhere_are_asked_for_at_the_hub(hub):
    with pytest.raises(ConfigError, match=f"some/model at commit {COMMIT[:12]}: {WEIGHTS} is not in the cache"):
        check_target_weights(hub.target)


def test_of_weights_on_the_hub_the_headers_alone_are_fetched(hub, tiny_folder: Path, monkeypatch):
    names = list(read_header(tiny_folder / WEIGHTS))
    (hub.snapshot / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "only.safetensors")}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []

    def header(self: HfApi, repo: str, filename: str, revision: str) -> SimpleNamespace:
        asked.append((repo, filename, revision))
        if filename == WEIGHTS:
            raise OSError("no network")
        return SimpleNamespace(tensors=read_header(tiny_folder / WEIGHTS))

    monkeypatch.setattr(HfApi, "parse_safetensors_file_metadata", header)
    monkeypatch.setattr(
        "draftworks.targets.safetensors_headers.fetch_hub_file",
        lambda where, model, revision, name: hub.snapshot / name,
    )
    assert len(read_model_headers(hub.target).tensors) == 74
    assert ("some/model", "only.safetensors", COMMIT) in asked
