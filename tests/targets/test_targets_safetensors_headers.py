"""Headers of safetensors files, local or on the hub: truncated, wrong or absent ones are reported; weights are not read.
Headers of quantised checkpoints: the names and shapes that the model without quantisation would have.
A head that the files hold beside tied embeddings equals them, or nothing is checked, taught or captured with it.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.capture.engine import load_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError
from draftworks.targets.safetensors_headers import (
    INDEX,
    UNKNOWN,
    WEIGHTS,
    TensorHeader,
    read_header,
    read_model_headers,
    strip_quantization,
)
from draftworks.targets.stored_head import compare_heads
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


def make_headers(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(dtype, shape, "model.safetensors") for name, (dtype, shape) in tensors.items()}


NORM = {"a.norm": ("BF16", (8,))}


@pytest.mark.parametrize(
    ("method", "stored", "plain"),
    [
        ("fp8", {"a.weight": ("F8_E4M3", (8, 4)), "a.weight_scale_inv": ("F32", (1, 1))}, {"a.weight": (8, 4)}),
        (
            "gptq",
            {
                "a.qweight": ("I32", (1, 8)),
                "a.qzeros": ("I32", (1, 1)),
                "a.scales": ("F16", (1, 8)),
                "a.g_idx": ("I32", (4,)),
            },
            {"a.weight": UNKNOWN},
        ),
        (
            "compressed-tensors",
            {"a.weight_packed": ("I32", (8, 1)), "a.weight_scale": ("BF16", (8, 1)), "a.weight_shape": ("I64", (2,))},
            {"a.weight": UNKNOWN},
        ),
        ("bitsandbytes", {"a.weight": ("U8", (16, 1)), "a.weight.absmax": ("F32", (1,))}, {"a.weight": UNKNOWN}),
        ("modelopt", {"a.weight": ("U8", (8, 2)), "a.weight_scale": ("F8_E4M3", (8, 1))}, {"a.weight": UNKNOWN}),
        ("mxfp4", {"a_blocks": ("U8", (2, 8, 3, 16)), "a_scales": ("U8", (2, 8, 3))}, {"a": (2, 96, 8)}),
    ],
)
def test_a_packed_weight_stands_for_one_whose_shape_its_bytes_do_not_tell(method, stored, plain):
    found = strip_quantization(make_headers(**stored, **NORM), {"quant_method": method})
    assert {name: header.shape for name, header in found.tensors.items()} == {**plain, "a.norm": (8,)}
    unshaped = {name for name, shape in plain.items() if shape == UNKNOWN}
    assert found.unshaped == unshaped
    assert (found.note is None) == (not unshaped)


def test_without_quantisation_headers_stay_as_they_are():
    headers = make_headers(**{"a.weight": ("U8", (16, 1)), **NORM})
    assert strip_quantization(headers, None).tensors == headers


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
