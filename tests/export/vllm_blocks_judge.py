"""Runs vLLM's models on exported block drafts that its runner for CPUs has no drafter of: a judge of judges.py.

Beside each FOLDER lie FOLDER.txt, the printed command, and FOLDER.safetensors with the questions of `block_questions.py`. vLLM
builds its configuration from the command, chooses the class, loads the files and runs the block. Three parts are not vLLM's:
attention, which needs a cache of pages; the loops of the drafters, which are Triton kernels of greedy choices; and the norms of
the context's keys, for which 0.32's kernel for CPUs takes the first layer's weights in all layers.
A `qwen3_xpress.py` in the folder of all is the class of XPress, which 0.32 lacks. Returns for every folder the name of the class, `unset`, the parameters that no file gave a value, and the `tokens` for every
question, or `refused`, why vLLM takes no such command.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm.config.vllm
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.utils import get_model_architecture, process_weights_after_loading
from vllm.model_executor.models import ModelRegistry, qwen3_dflash
from vllm_commands import read_command

MORE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]


class PlainAttention(nn.Module):
    """Replaces a layer's `Attention`: in full, of a block to its context and to itself."""

    def __init__(self, heads: int, head_dim: int, scale: float, num_kv_heads: int, prefix: str, **others: Any) -> None:
        super().__init__()
        assert others["per_layer_sliding_window"] is None
        self.layer_name, self.kv_cache, self.impl, self._shape, self._scale = (
            prefix,
            None,
            self,
            (-1, heads, head_dim),
            scale,
        )
        self._kv_shape = (-1, num_kv_heads, head_dim)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # `impl` is this module itself

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Any) -> None:
        self.written = key, value

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (
            torch.cat([old, new.view(self._kv_shape)]).transpose(0, 1) for old, new in zip(self.written, (key, value))
        )
        queries = query.view(self._shape).transpose(0, 1)
        seen = F.scaled_dot_product_attention(queries, keys, values, scale=self._scale, enable_gqa=True)
        return seen.transpose(0, 1).flatten(1)


def norm_keys_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Replaces `_normalize_context_k`, (layers, n, heads, D): each layer's keys with its own weights, as on a GPU."""
    normed = [
        F.rms_norm(each, each.shape[-1:], weight, model._rms_norm_eps)
        for each, weight in zip(keys, model._k_norm_weights)
    ]
    return torch.stack(normed)


@dataclass(frozen=True)
class Loaded:
    """vLLM's model of a draft, with the target's embedding and head, and the names of parameters that no file is for."""

    model: Any
    unset: list[str]


def load(config: VllmConfig, folder: Path, asked: dict[str, Tensor]) -> Loaded:
    assert config.speculative_config is not None
    draft = config.speculative_config.draft_model_config
    kind, _ = get_model_architecture(draft)
    model: Any = kind(vllm_config=config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(load_file(folder / "model.safetensors").items())
    for table, rows in ((model.model.embed_tokens, asked["embedding"]), (model.lm_head, asked["head"])):
        table.weight_loader(table.weight, rows)
    unset = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    unset.remove("model.mask_embedding")  # which only some drafts have, in a file of its own
    process_weights_after_loading(model, draft, torch.device("cpu"))
    return Loaded(model.eval(), unset)


def run_block(model: Any, features: Tensor, anchor: Tensor, size: int, mask: int) -> Tensor:
    """Return the states (size, H) of a block after a context."""
    rows = len(features)
    model.precompute_and_store_context_kv(model.combine_hidden_states(features), torch.arange(rows), torch.arange(rows))
    block = torch.full((size,), mask)
    block[0] = anchor[0]
    return model(block, torch.arange(rows, rows + size))


def walk(candidates: Tensor, scores: Tensor) -> list[int]:
    """The greedy walk of `_selector_walk_kernel`, over ids (n, k) and scores (n, k of the one before, k)."""
    chosen, previous = [], 0
    for ids, table in zip(candidates, scores):
        previous = int(table[previous].argmax())
        chosen.append(int(ids[previous]))
    return chosen


def propose_by_selector(model: Any, states: Tensor, anchor: Tensor, features: Tensor, asked: Any) -> list[int]:
    candidates, logits = (each[None] for each in model.compute_candidates(states[1:]))
    return walk(candidates[0], model.model.candidate_selector(candidates, logits, states[None, 1:], anchor)[0])


def propose_by_lattice(model: Any, states: Tensor, anchor: Tensor, features: Tensor, asked: Any) -> list[int]:
    candidates, logits = (each[None] for each in model.compute_candidates(states[1:]))
    context = model.model.hidden_norm(model.combine_hidden_states(features)[-1:])
    embedded = asked["embedding"][candidates]
    return walk(
        candidates[0], model.model.lilicorr(embedded, logits, states[None, 1:], context, torch.ones(1).bool())[0]
    )


def propose_by_chain(model: Any, states: Tensor, anchor: Tensor, features: Tensor, asked: Any) -> list[int]:
    chosen = [anchor]
    for logits in model.compute_draft_logits(states):
        chosen.append((logits + model.markov_bias(model.markov_embed(chosen[-1]))).argmax(-1))
    return [int(token) for token in chosen[1:]]


def propose_by_refiner(model: Any, states: Tensor, anchor: Tensor, features: Tensor, asked: Any) -> list[int]:
    base, head = model.compute_draft_logits(states), model.model.xpress_head
    cached, tokens = head.hidden_cache(states[None]), base[1:].argmax(-1)
    for _ in range(model.config.xpress_num_passes):
        before = torch.cat([anchor, anchor, tokens[:-1]])[None]
        tokens = (base + head.refine_bias(before, cached)[0])[1:].argmax(-1)
    return tokens.tolist()


PROPOSE = {
    "Qwen3XPressForCausalLM": propose_by_refiner,
    "DFlash2Qwen3ForCausalLM": propose_by_selector,
    "LiLiCorrForCausalLM": propose_by_lattice,
    "Qwen3DSparkForCausalLM": propose_by_chain,
}


def add_class(file: Path) -> None:
    """Register the class of XPress, a module of vLLM 0.33, without its kernels, which are Triton's."""
    room = ModuleType("vllm.v1.worker.gpu.spec_decode.xpress")
    room.kernels = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[room.__name__] = room
    spec = spec_from_file_location("vllm.model_executor.models.qwen3_xpress", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._dynamo.config.disable = True
    for name in ("Qwen3XPressModel", "DFlashQwen3XPressModel"):
        ModelRegistry.register_model(name, module.Qwen3XPressForCausalLM)


def judged(folder: Path) -> dict[str, Any]:
    asked, command = load_file(folder.with_suffix(".safetensors")), folder.with_suffix(".txt").read_text()
    config = read_command(command, MORE).create_engine_config()
    with set_current_vllm_config(config):
        loaded = load(config, folder, asked)
        model = loaded.model
        name, speculative = type(model).__name__, config.speculative_config
        size = speculative.num_speculative_tokens + (name != "Qwen3DSparkForCausalLM")
        mask = (
            model.config.dflash_config["mask_token_id"]
            if hasattr(model.config, "dflash_config")
            else model.config.mask_token_id
        )
        tokens = []
        for question in range(sum(key.startswith("anchor.") for key in asked)):
            features, anchor = asked[f"features.{question}"], asked[f"anchor.{question}"]
            states = run_block(model, features, anchor, size, mask)
            tokens.append(PROPOSE[name](model, states, anchor, features, asked))
    return {"class": name, "unset": loaded.unset, "tokens": tokens}


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    # Else vLLM refuses: "Model Runner V1 does not support: DFlash candidate-head drafts", "Model Runner V2 requires Triton".
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    vllm.config.vllm.HAS_TRITON = True
    qwen3_dflash.Attention = PlainAttention
    qwen3_dflash.DFlashQwen3Model._normalize_context_k = norm_keys_by_layer
    for file in folders[0].parent.glob("qwen3_xpress.py"):
        add_class(file)
    first = read_command(folders[0].with_suffix(".txt").read_text(), MORE).create_engine_config()
    with set_current_vllm_config(first):
        init_distributed_environment(1, 0, f"file://{work}/meeting", 0, "gloo")
        initialize_model_parallel()
    found = []
    for folder in folders:
        try:
            found.append(judged(folder))
        except (ValueError, NotImplementedError) as error:
            found.append({"refused": f"{type(error).__name__}: {error}"})
    return found
