from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """A target with the tiny one's config, small, untied and sharded over two files."""
    config = json.loads((tiny_folder / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "vocab_size": 12, "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shards = {"a.safetensors": {EMBEDDING: torch.randn(12, 8)}, "b.safetensors": {HEAD: torch.randn(12, 8).bfloat16()}}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    index = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.fixture
def target(folder: Path, tiny_target: TargetFiles) -> TargetFiles:
    return tiny_target.model_copy(update={"model": str(folder)})


def test_tiny_target_is_tied_and_has_the_facts_of_its_config(tiny_target: TargetFiles):
    parts = TargetParts.load(tiny_target)
    assert parts.tied
    assert parts.embedding.shape == (tiny_target.vocab_size, tiny_target.hidden_size)
    assert (parts.num_heads, parts.num_kv_heads, parts.head_dim, parts.num_layers) == (4, 2, 32, 8)
    assert parts.rope["rope_theta"] == 10000.0
    assert parts.max_positions == tiny_target.context


def test_sharded_untied_target_gives_both_tensors_in_their_own_dtype(target: TargetFiles):
    parts = TargetParts.load(target)
    assert not parts.tied
    assert parts.embedding.dtype == torch.float32
    assert parts.head.dtype == torch.bfloat16


def test_only_the_shards_that_hold_them_are_opened(target: TargetFiles, folder: Path):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "absent.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert TargetParts.load(target).vocab_size == 12


def test_missing_directory(tiny_target: TargetFiles, tmp_path: Path):
    target = tiny_target.model_copy(update={"model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="target tiny: .*nowhere: no such directory. Correct `model`"):
        TargetParts.load(target)


def test_missing_config(target: TargetFiles, folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json is missing: not a Hugging Face model directory"):
        TargetParts.load(target)


def test_missing_weights(target: TargetFiles, folder: Path):
    (folder / "b.safetensors").unlink()
    with pytest.raises(StoreError, match=r"b.safetensors is missing"):
        TargetParts.load(target)


def test_truncated_weights(target: TargetFiles, folder: Path):
    shard = folder / "a.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(StoreError, match=r"a.safetensors: not a readable safetensors file"):
        TargetParts.load(target)


def test_missing_tensor(target: TargetFiles, folder: Path):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: "a.safetensors"}}))
    with pytest.raises(StoreError, match=r"expected one tensor '\*lm_head.weight', found none among 1 tensors"):
        TargetParts.load(target)


def test_tensor_of_another_shape(target: TargetFiles, folder: Path):
    save_file({HEAD: torch.randn(13, 8)}, folder / "b.safetensors")
    with pytest.raises(StoreError, match=r"lm_head.weight: expected floating point \(12, 8\).*found .* \(13, 8\)"):
        TargetParts.load(target)


def test_head_that_rescales_its_logits(target: TargetFiles, folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="final_logit_softcapping: targets that rescale their logits"):
        TargetParts.load(target)


def test_hub_target_that_is_not_in_the_cache(tiny_target: TargetFiles, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    target = tiny_target.model_copy(update={"model": "nobody/nothing", "revision": "0" * 40})
    with pytest.raises(ConfigError, match="config.json is not in the cache and the hub cannot be reached"):
        TargetParts.load(target)


def test_hub_target_is_read_from_its_pinned_snapshot(target: TargetFiles, folder: Path, monkeypatch, tmp_path_factory):
    cache, commit = tmp_path_factory.mktemp("hub"), "a" * 40
    snapshot = cache / "models--some--model" / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    hub = target.model_copy(update={"model": "some/model", "revision": commit})
    assert torch.equal(TargetParts.load(hub).embedding, TargetParts.load(target).embedding)


def test_a_wrapper_ties_for_its_text_part_where_there_is_no_head_of_its_own(
    family_target: Callable[[str], TargetFiles], tmp_path: Path
):
    made = family_target("gemma3")
    shutil.copytree(made.model, tmp_path / "wrapper")
    config = json.loads((tmp_path / "wrapper" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "wrapper" / "config.json").write_text(json.dumps(config))
    assert TargetParts.load(made.model_copy(update={"model": str(tmp_path / "wrapper")})).tied


def test_embeddings_of_layers_that_predict_further_tokens_are_not_taken(family_target: Callable[[str], TargetFiles]):
    """DeepSeek's files have an embedding and a head in the layer after the last."""
    made = family_target("deepseek_v3")
    names = json.loads((Path(made.model) / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(name.endswith("embed_tokens.weight") for name in names) == 2
    parts = TargetParts.load(made)
    with safe_open(Path(made.model) / "model.safetensors", framework="pt") as stream:
        assert torch.equal(parts.embedding, stream.get_tensor("model.embed_tokens.weight"))
        assert torch.equal(parts.head, stream.get_tensor("lm_head.weight"))


def rename(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write other tensors to the folder, in one file without an index."""
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


MATRIX = torch.ones(12, 8)
REFUSED = {
    "gpt_neox.embed_in.weight": (
        {"gpt_neox.embed_in.weight": MATRIX, HEAD: MATRIX},
        r"'\*\.embed_tokens\.weight', found none",
    ),
    "embed_out": ({EMBEDDING: MATRIX, "embed_out.weight": MATRIX}, r"'\*lm_head\.weight', found none"),
    "packed head": ({EMBEDDING: MATRIX, "lm_head.qweight": torch.ones(2, 8, dtype=torch.int32)}, "found none"),
    "two embeddings": ({EMBEDDING: MATRIX, "decoder.embed_tokens.weight": MATRIX, HEAD: MATRIX}, "found several"),
    "another shape": ({EMBEDDING: torch.ones(13, 8), HEAD: MATRIX}, "expected floating point"),
    "integers": ({EMBEDDING: MATRIX.to(torch.int8), HEAD: MATRIX}, "expected floating point"),
}


@pytest.mark.parametrize("tensors", [True, False], ids=["weights", "headers"])
@pytest.mark.parametrize(("held", "message"), REFUSED.values(), ids=REFUSED)
def test_headers_refuse_what_weights_do(target: TargetFiles, folder: Path, held, message: str, tensors: bool):
    rename(folder, held)
    with pytest.raises(StoreError, match=message):
        TargetParts.load(target, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False], ids=["weights", "headers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_headers_take_what_weights_do(target: TargetFiles, folder: Path, dtype: torch.dtype, tensors: bool):
    rename(folder, {EMBEDDING: MATRIX.to(dtype), HEAD: MATRIX, "model.vision.embed_tokens.weight": MATRIX[:3]})
    parts = TargetParts.load(target, tensors=tensors)
    assert parts.embedding.shape == parts.head.shape == (12, 8)
    assert not parts.head_bias


@pytest.mark.parametrize("tensors", [True, False], ids=["weights", "headers"])
def test_a_bias_of_the_head_is_known(target: TargetFiles, folder: Path, tensors: bool):
    rename(folder, {EMBEDDING: MATRIX, HEAD: MATRIX, "lm_head.bias": MATRIX[:, 0]})
    assert TargetParts.load(target, tensors=tensors).head_bias
