"""Weights are compared with their configuration by headers alone; tensors that transformers would misload are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from model_families import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftworks.capture.engine import load_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.targets.safetensors_headers import INDEX, WEIGHTS
from draftworks.targets.weights import WeightsCheck, check_target_weights


@pytest.fixture
def copied(tiny_target: TargetFiles, tiny_folder: Path, tmp_path: Path) -> TargetFiles:
    shutil.copytree(tiny_folder, tmp_path / "model")
    return tiny_target.model_copy(update={"model": str(tmp_path / "model")})


def rewrite(target: TargetFiles, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = Path(target.model) / WEIGHTS
    save_file(change(load_file(path)), path)


def set_config(target: TargetFiles, **fields: object) -> None:
    path = Path(target.model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_whole_checkpoint_passes(tiny_target):
    assert check_target_weights(tiny_target) == WeightsCheck("LlamaForCausalLM", 74)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_as_it_is_saved(name: str, family_target):
    assert check_target_weights(family_target(name)).note is None


@pytest.mark.parametrize("name", gate_or_long(FAMILIES, ["llama", "qwen3_5_moe", "gemma3", "deepseek_v3"]))
def test_any_tensor_that_is_taken_away_or_renamed_is_missed_by_name(name: str, family_target, tmp_path: Path):
    target = family_target(name)
    tensors = load_file(Path(target.model) / WEIGHTS)
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    target = target.model_copy(update={"model": str(tmp_path)})
    loads = [each for each in tensors if "visual" not in each and not each.startswith("mtp")]
    for victim in loads[:: max(1, len(loads) // 5)]:
        save_file({each: tensor for each, tensor in tensors.items() if each != victim}, tmp_path / WEIGHTS)
        with pytest.raises(StoreError, match=r"do not belong to its config.json"):
            check_target_weights(target)
        renamed = {f"{each}s" if each == victim else each: tensor for each, tensor in tensors.items()}
        save_file(renamed, tmp_path / WEIGHTS)
        with pytest.raises(StoreError, match=r"do not belong to its config.json"):
            check_target_weights(target)


def test_names_of_a_compiled_model_are_told_with_what_to_do(copied):
    rewrite(copied, lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(StoreError, match=r"75 tensors are missing: lm_head\.weight; 74 are unexpected.*"
                       r"All names begin with `_orig_mod\.`.*save the model inside"):  # fmt: skip
        check_target_weights(copied)


def test_a_config_of_fewer_layers_is_told_by_both_numbers(copied):
    set_config(copied, num_hidden_layers=6)
    with pytest.raises(StoreError, match=r"18 tensors are unexpected: model\.layers\.6\.input_layernorm\.weight\. "
                       r"config.json says num_hidden_layers 6, the files have 8"):  # fmt: skip
        check_target_weights(copied)


def test_another_shape_is_told_with_both(copied):
    set_config(copied, intermediate_size=64)
    with pytest.raises(StoreError, match=r"24 tensors are of another shape: .* is \[\d+, \d+\], expected \[\d+, \d+\]"):
        check_target_weights(copied)


def test_an_index_that_names_absent_files_is_refused(copied):
    folder = Path(copied.model)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    names = list(load_file(folder / "a.safetensors"))
    weight_map = dict.fromkeys(names, "a.safetensors") | {names[0]: "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StoreError, match=r"names 2 files, and 1 of them are absent, such as b\.safetensors"):
        check_target_weights(copied)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    assert check_target_weights(copied).tensors == len(names)


def test_two_sources_of_one_tensor_are_refused(copied):
    folder = Path(copied.model)
    shutil.copy(folder / WEIGHTS, folder / "new.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), "new.safetensors")})
    )
    with pytest.raises(StoreError, match=r"74 tensors are in model\.safetensors, and by .* in other files too"):
        check_target_weights(copied)


def test_a_gap_among_experts_is_no_renumbering(family_target, tmp_path: Path):
    """Experts are stacked in the order of their numbers, so experts 0, 1, 3, 4 would be loaded as 0 to 3."""
    target = family_target("qwen3_moe")
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    tensors = load_file(Path(target.model) / WEIGHTS)
    moved = {name.replace(".experts.2.", ".experts.4."): tensor for name, tensor in tensors.items()}
    save_file(moved, tmp_path / WEIGHTS)
    with pytest.raises(StoreError, match=r"experts\.\*\.\w+\.weight \(absent numbers between 0 and 4: 2\)"):
        check_target_weights(target.model_copy(update={"model": str(tmp_path)}))


def test_lookahead_layers_are_no_strangers_but_a_layer_too_many_is(family_target, tmp_path: Path):
    target = family_target("deepseek_v3")
    shutil.copytree(target.model, tmp_path, dirs_exist_ok=True)
    (tmp_path / INDEX).unlink()
    target = target.model_copy(update={"model": str(tmp_path)})
    tensors = load_file(tmp_path / WEIGHTS) | load_file(tmp_path / "model-mtp.safetensors")
    save_file(tensors, tmp_path / WEIGHTS)
    assert check_target_weights(target).note is None
    set_config(target, num_hidden_layers=5)
    with pytest.raises(StoreError, match=r"unexpected: model\.layers\.5"):
        check_target_weights(target)


def test_a_quantised_checkpoint_is_checked_by_what_its_tensors_stand_for(family_target, tmp_path: Path):
    """gpt-oss as published: experts in blocks of 4-bit values with scales."""
    target = family_target("gpt_oss")
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    tensors = load_file(Path(target.model) / WEIGHTS)
    target = target.model_copy(update={"model": str(tmp_path)})
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 8, 4, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(experts, rows, columns // 8, dtype=torch.uint8)
    save_file(tensors, tmp_path / WEIGHTS)
    set_config(target, quantization_config={"quant_method": "mxfp4"})
    assert check_target_weights(target).model_class == "GptOssForCausalLM"
    block = next(each for each in tensors if each.endswith("_blocks"))
    save_file({name: tensor for name, tensor in tensors.items() if name != block}, tmp_path / WEIGHTS)
    with pytest.raises(StoreError, match=r"1 tensors are missing: model\.layers\.0\.mlp\.experts\.\w+_proj"):
        check_target_weights(target)


def test_scales_of_a_checkpoint_that_says_nothing_of_quantisation_are_unexpected(copied):
    first = "model.layers.0.mlp.up_proj.weight"
    rewrite(copied, lambda tensors: tensors | {f"{first}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(StoreError, match=r"1 tensors are unexpected: model\.layers\.0\.mlp\.up_proj\.weight_scale_inv"):
        check_target_weights(copied)
    set_config(copied, quantization_config={"quant_method": "fp8"})
    assert check_target_weights(copied).tensors == 75


def test_an_unknown_family_blocks_hf_alone(copied):
    set_config(copied, model_type="of_tomorrow", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(
        ConfigError, match=r"target tiny: .*does not know the model_type 'of_tomorrow'.*code of its own"
    ):
        check_target_weights(copied)
    assert "does not know the model_type 'of_tomorrow'" in check_target_weights(copied, "sglang").note


def test_a_verdict_is_remembered_while_the_files_are_the_same(copied, tmp_path: Path, monkeypatch):
    memory = tmp_path / "memory"
    first = check_target_weights(copied, cache_folder=memory)
    monkeypatch.setattr("draftworks.targets.weights.read_model_headers", lambda target: pytest.fail("read again"))
    assert check_target_weights(copied, cache_folder=memory) == first
    monkeypatch.undo()
    rewrite(copied, lambda tensors: dict(list(tensors.items())[1:]))
    with pytest.raises(StoreError, match="2 tensors are missing: lm_head"):
        check_target_weights(copied.model_copy(update={"digest": "of the new weights"}), cache_folder=memory)


def test_a_verdict_that_cannot_be_read_is_made_again(copied, tmp_path: Path):
    first = check_target_weights(copied, cache_folder=tmp_path / "memory")
    for path in (tmp_path / "memory").iterdir():
        path.write_text("{")
    assert check_target_weights(copied, cache_folder=tmp_path / "memory") == first


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3", "deepseek_v3"])
def test_headers_say_what_the_loader_finds(name: str, family_target, tmp_path: Path):
    """The check agrees with transformers' own report of a real loading."""
    target = family_target(name)
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    tensors = load_file(Path(target.model) / WEIGHTS)
    lost = [each for each in tensors if each.endswith("norm.weight")][1]
    save_file({each: tensor for each, tensor in tensors.items() if each != lost} | {"more": torch.ones(1)},
              tmp_path / WEIGHTS)  # fmt: skip
    loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, trust_remote_code=False)[1]
    assert loading["missing_keys"]
    assert loading["unexpected_keys"]
    with pytest.raises(StoreError) as refusal:
        check_target_weights(replace_folder(target, tmp_path))
    missing, unexpected = (sorted(loading[f"{kind}_keys"]) for kind in ("missing", "unexpected"))
    assert f"{len(missing)} tensors are missing: {missing[0]}; {len(unexpected)} are unexpected" in str(refusal.value)


def replace_folder(target: TargetFiles, folder: Path) -> TargetFiles:
    return target.model_copy(update={"model": str(folder)})


@pytest.mark.parametrize("text", ["[]", "{", '{"model_type": "llama", "hidden_size": "wide"}', '{"model_type": "llama", '
                                  '"num_hidden_layers": -1, "hidden_size": 7, "num_attention_heads": 3}', "[" * 100_000])  # fmt: skip
def test_a_senseless_config_is_one_clear_error(copied, text: str):
    (Path(copied.model) / "config.json").write_text(text)
    with pytest.raises(DraftworksError):
        check_target_weights(copied)


def test_weights_that_only_transformers_would_load_are_refused(copied):
    (Path(copied.model) / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="merge the adapter"):
        check_target_weights(copied)
    (Path(copied.model) / "adapter_config.json").unlink()
    set_config(copied, transformers_weights="other.safetensors")
    with pytest.raises(ConfigError, match=r"transformers_weights names 'other\.safetensors'"):
        check_target_weights(copied)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_as_they_are_in_the_module_pass_too(name: str, family_target, tmp_path: Path):
    """A state dict as trainers write it: fused experts, without the prefixes of published checkpoints."""
    target = family_target(name)
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    state = AutoModelForCausalLM.from_pretrained(target.model, trust_remote_code=False).state_dict()
    save_file({each: tensor.clone() for each, tensor in state.items()}, tmp_path / WEIGHTS)
    assert check_target_weights(replace_folder(target, tmp_path)).note is None


def test_a_vision_tower_in_the_layout_of_the_hub_passes(family_target, tmp_path: Path):
    target = family_target("gemma3")
    shutil.copy(Path(target.model) / "config.json", tmp_path)
    tensors = load_file(Path(target.model) / WEIGHTS)
    published = {each.replace("vision_tower.", "vision_tower.vision_model."): tensors[each] for each in tensors}
    save_file(published, tmp_path / WEIGHTS)
    assert check_target_weights(replace_folder(target, tmp_path)).model_class == "Gemma3ForConditionalGeneration"


def test_files_that_no_index_names_do_not_count(copied):
    folder = Path(copied.model)
    (folder / WEIGHTS).rename(folder / "shard.safetensors")
    names = load_file(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors")}))
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert check_target_weights(copied).tensors == 74


def test_the_loader_refuses_what_it_would_draw_at_random(copied):
    """The loader itself checks too, for programs that are started by hand."""
    rewrite(copied, lambda tensors: {name: t for name, t in tensors.items() if "layers.3.mlp" not in name})
    with pytest.raises(StoreError, match=r"target tiny: .*3 tensors are missing: model\.layers\.3\.mlp\.down_proj"):
        load_engine(copied, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
    rewrite(copied, lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(StoreError, match=r"All names begin with `_orig_mod\.`"):
        load_engine(copied, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
