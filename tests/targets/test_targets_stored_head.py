"""A head that the files hold beside tied embeddings equals them, or nothing is checked, taught or captured with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.capture.engine import load_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import StoreError
from draftworks.targets.safetensors_headers import INDEX, WEIGHTS
from draftworks.targets.stored_head import compare_heads
from draftworks.targets.weights import check_target_weights

REFUSED = "Set tie_word_embeddings to false, or remove the stored head"
CPU = torch.device("cpu")


def load_here(target: TargetFiles) -> object:
    return load_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), CPU)


READERS: dict[str, Callable[[TargetFiles], object]] = {
    "check": check_target_weights,
    "teacher": TargetParts.load,
    "engine": load_here,
}


def store(target: TargetFiles, folder: Path, head: Callable[[Tensor], Tensor], sharded: bool = False) -> TargetFiles:
    """A copy of a target that stores a head made of its embeddings, under the name that its wrapper gives it."""
    shutil.copytree(target.model, folder)
    tensors = load_file(folder / WEIGHTS)
    name = next(each for each in tensors if each.endswith("embed_tokens.weight"))
    own = name.replace("model.embed_tokens", "lm_head").removeprefix("model.")
    tensors[own] = head(tensors[name]).contiguous()
    (folder / INDEX).unlink(missing_ok=True)
    if not sharded:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        (folder / WEIGHTS).unlink()
        files = {each: "a.safetensors" if each == name else "b.safetensors" for each in tensors}
        for file in ("a.safetensors", "b.safetensors"):
            part = {each: tensors[each] for each in tensors if files[each] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return target.model_copy(update={"model": str(folder)})


def move(matrix: Tensor) -> Tensor:
    """Another head: one value of the last row is another."""
    moved = matrix.clone()
    moved[-1, -1] += 1
    return moved


STORED = {
    "as it is": lambda matrix: matrix.clone(),
    "narrower": lambda matrix: matrix.to(torch.bfloat16),
    "wider": lambda matrix: matrix.to(torch.float64),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", ["tiny", "qwen3", "gemma3"])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_a_head_that_differs_from_tied_embeddings_is_refused_and_an_equal_one_is_not(
    tiny_target, family_target, tmp_path: Path, family: str, stored, sharded: bool
):
    target = tiny_target if family == "tiny" else family_target(family)
    same = store(target, tmp_path / "same", stored, sharded)
    other = store(target, tmp_path / "other", lambda matrix: stored(move(matrix)), sharded)
    assert compare_heads(same).problem is None
    assert TargetParts.load(same).tied
    assert check_target_weights(same).note is None
    for read in (check_target_weights, TargetParts.load):
        with pytest.raises(StoreError, match=REFUSED):
            read(other)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_check_the_teacher_and_the_engine_each_refuse_it(tiny_target, tmp_path: Path, reader):
    """A merged adapter whose head was trained, saved with the config of its base model."""
    with pytest.raises(StoreError, match=rf"lm_head\.weight differs from them.*{REFUSED}") as refusal:
        reader(store(tiny_target, tmp_path / "merged", move))
    assert "\n" not in str(refusal.value)


def set_tie(target: TargetFiles, **parts: bool | None) -> None:
    path = Path(target.model) / "config.json"
    config = json.loads(path.read_text())
    for part, value in parts.items():
        own = config if part == "whole" else config["text_config"]
        own.pop("tie_word_embeddings", None)
        own |= {} if value is None else {"tie_word_embeddings": value}
    path.write_text(json.dumps(config))


def test_both_ways_out_that_the_message_names_lead_out(tiny_target, tmp_path: Path):
    other = store(tiny_target, tmp_path / "merged", move)
    set_tie(other, whole=False)
    assert check_target_weights(other).note is None
    assert not TargetParts.load(other).tied
    set_tie(other, whole=True)
    tensors = load_file(tmp_path / "merged" / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "merged" / WEIGHTS)
    assert TargetParts.load(other).tied


@pytest.mark.parametrize(
    ("whole", "text", "refused"),
    [(True, False, True), (False, True, True), (None, None, True), (None, False, False), (False, False, False)],
)
def test_a_wrapper_ties_by_either_of_its_configs_and_by_its_class(
    family_target, tmp_path: Path, whole: bool | None, text: bool | None, refused: bool
):
    """Gemma's class ties where its file says nothing."""
    other = store(family_target("gemma3"), tmp_path / "model", move)
    set_tie(other, whole=whole, text=text)
    assert (compare_heads(other).problem is not None) == refused


def test_a_packed_head_cannot_be_compared_and_is_refused(tiny_target, tmp_path: Path):
    target = store(tiny_target, tmp_path / "model", torch.clone)
    tensors = load_file(tmp_path / "model" / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors | {"lm_head.qweight": torch.ones(16, 2048, dtype=torch.int32)}, tmp_path / "model" / WEIGHTS)
    assert "lm_head.qweight is packed" in (compare_heads(target).problem or "")


def test_a_head_of_the_hub_is_compared_where_its_files_are_there(tiny_target, tmp_path: Path, monkeypatch):
    """Before the download a verdict would cost gigabytes; the engine, which needs them, asks again."""
    cache, commit = tmp_path / "hub", "a" * 40
    snapshot = cache / "models--some--model" / "snapshots" / commit
    store(tiny_target, snapshot, move, sharded=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    hub = tiny_target.model_copy(update={"model": "some/model", "revision": commit})
    assert REFUSED in (compare_heads(hub, download=False).problem or "")
    (snapshot / "b.safetensors").unlink()
    assert "is not downloaded yet" in (compare_heads(hub, download=False).note or "")


def test_a_verdict_that_waits_for_a_download_is_not_kept(tiny_target, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        "draftworks.targets.weights.compare_heads",
        lambda target, download: compare_heads(target).__class__(note="later"),
    )
    assert check_target_weights(tiny_target, cache_folder=tmp_path).note == "later"
    monkeypatch.undo()
    assert check_target_weights(tiny_target, cache_folder=tmp_path).note is None
