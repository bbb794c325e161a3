"""A target of a published size: its config.json, and weights of the right names, shapes and number of bytes without content."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from model_families import TOKENIZER, TOKENIZER_FILES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from draftworks.storage.identity import FileDigests

_SHARD_BYTES = 5e9
_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rope_parameters")


class GivenDigests(FileDigests):
    """Digests in which those of weights are given: a terabyte that was never written is not read either."""

    def of_file(self, path: Path) -> str:
        return "0" * 16 if path.suffix == ".safetensors" else super().of_file(path)


def save_published_target(config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json as it is, the tokenizer of `tiny`, and sparse shards of unquantised bfloat16 weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, folder / file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    weight_map = {}
    for number, shard in enumerate(_cut(_list_tensors(folder))):
        name = f"model-{number}.safetensors"
        _write_sparse(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def respell_rope(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a saved target with its rope as transformers 5 writes it, or as 4 did if it is so already."""
    text = dict(config.get("text_config", config))
    plain = {name: value for name, value in text.items() if name not in _ROPE}
    if "rope_parameters" in text:
        rope = dict(text["rope_parameters"])
        moved = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        plain |= {**moved, "rope_scaling": None if rope == {"rope_type": "default"} else rope}
    else:
        plain["rope_parameters"] = AutoConfig.from_pretrained(folder).get_text_config().to_dict()["rope_parameters"]
    return {**config, "text_config": plain} if "text_config" in config else plain


def _list_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the model's tensors on device meta, with those of an MTP layer where its family publishes one."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    known = type(config) in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        model = (AutoModelForCausalLM if known else AutoModelForImageTextToText).from_config(config)
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return tensors | _list_mtp_tensors(config.get_text_config(), tensors)


def _list_mtp_tensors(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its decoder layer has the tensors of the model's last one."""
    last, width = config.num_hidden_layers - 1, config.hidden_size
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        norms = ("mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", "mtp.norm")
        layer, fc = "mtp.layers.0.", "mtp.fc"
    elif config.model_type == "deepseek_v3":
        layer = f"model.layers.{last + 1}."
        norms, fc = (f"{layer}hnorm", f"{layer}enorm", f"{layer}shared_head.norm"), f"{layer}eh_proj"
    else:
        return {}
    found = {f"{fc}.weight": torch.empty(width, 2 * width, device="meta")}
    found |= {f"{name}.weight": torch.empty(width, device="meta") for name in norms}
    for name, tensor in tensors.items():
        if inside := re.match(rf"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.{last}\.(.*)$", name):
            found[f"{layer}{inside[1]}"] = tensor
    return found


def _cut(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and 2 * sum(each.numel() for each in (*shard.values(), tensor)) > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _write_sparse(tensors: Mapping[str, Tensor], path: Path) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        stream.truncate(8 + len(encoded) + end)
