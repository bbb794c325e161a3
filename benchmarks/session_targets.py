"""Work of a session on a GPU with a target of random weights: capture of hidden states, and the cost of verification."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from gpu_cases import SHAPES
from session_rows import RowFile
from session_steps import Ready, median_ms, synchronize
from session_tasks import Settings, Task
from torch import Tensor
from torch.nn import functional as F

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.storage.identity import LayerTap

LAYERS = 4
BATCHES, NEW_TOKENS, CONTEXTS = (1, 8, 32), (1, 2, 4, 8, 16), (512, 4096)


def build_target(settings: Settings) -> Any:
    """Return a model of the target's layer sizes, a few layers deep, drawn on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[settings.size]
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        head_dim=shape.head_dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=LAYERS,
        vocab_size=shape.vocab,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(settings.device):
        return Qwen3ForCausalLM(config).eval()


def measure_capture(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Measure hidden states of all taps through the engine, beside the bare forward with and without logits, in turns."""
    ready()
    device, model = torch.device(settings.device), build_target(settings)
    engine = HFTargetEngine(model, cast(Any, None), context=32_768)
    sequences = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in settings.lengths]
    taps = [LayerTap(place) for place in range(1, LAYERS)]
    padded = engine._pad(sequences)
    sides: dict[str, Callable[[], object]] = {
        "capture": lambda: engine.capture(sequences, taps),
        "bare forward": lambda: model(**padded, use_cache=False),
        "bare forward, no head": lambda: model.base_model(**padded, use_cache=False),
    }
    laps: dict[str, list[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for turn in range(settings.steps + 1):
            for name, side in sides.items():
                synchronize(device)
                begin = time.perf_counter()
                side()
                synchronize(device)
                if turn:
                    laps[name].append(time.perf_counter() - begin)
    for name, seconds in laps.items():
        middle = sorted(seconds)[len(seconds) // 2]
        rows.add(
            task.part, task.name, key=name, ms=middle * 1e3, tokens_per_s=sum(settings.lengths) / middle, layers=LAYERS
        )


class RoomyCache:
    """Keys and values in buffers that have room for new tokens, which are written over at every call."""

    def __init__(self, batch: int, context: int, new: int, model: Any, device: torch.device) -> None:
        config, self._context = model.config, context
        size = (LAYERS, 2, batch, config.num_key_value_heads, context + new, config.head_dim)
        self._buffer = torch.randn(size, device=device, dtype=torch.bfloat16)

    def update(self, keys: Tensor, values: Tensor, layer: int, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        buffer = self._buffer[layer]
        buffer[0, :, :, self._context :] = keys
        buffer[1, :, :, self._context :] = values
        return buffer[0], buffer[1]


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    """Attention of new tokens behind a context: flash on a GPU, whose causal mask ends at the last key."""
    new, length = query.shape[2], key.shape[2]
    if query.device.type == "cuda":
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, new > 1)[0]
    else:
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def measure_verify(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Measure a layer and the head by sequences, new tokens of each, and context; on a GPU as a graph, too."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ready()
    ALL_ATTENTION_FUNCTIONS.register("new_tokens", attend)
    device, model = torch.device(settings.device), build_target(settings)
    model.config._attn_implementation = "new_tokens"
    done = rows.keys(task.part, task.name)
    contexts = CONTEXTS if settings.size != "tiny" else (16, 32)
    for context, batch, new in product(contexts, BATCHES, NEW_TOKENS):
        key = f"{batch} x {new} after {context}"
        if key not in done:
            figures = measure_forward(model, device, batch, new, context)
            rows.add(task.part, task.name, key=key, batch=batch, new=new, context=context, **figures)


@torch.inference_mode()
def measure_forward(model: Any, device: torch.device, batch: int, new: int, context: int) -> dict[str, float | None]:
    """Return milliseconds of a layer and of the head, launched one by one and as a graph."""
    cache = RoomyCache(batch, context, new, model, device)
    states = torch.randn(batch, new, model.config.hidden_size, device=device, dtype=torch.bfloat16)
    positions = torch.arange(context, context + new, device=device)[None].expand(batch, new)
    rotation = model.model.rotary_emb(states, positions)

    def layers() -> Tensor:
        out = states
        for layer in model.model.layers:
            given = layer(out, position_embeddings=rotation, position_ids=positions, past_key_values=cache)
            out = given if isinstance(given, Tensor) else given[0]
        return out

    def head() -> Tensor:
        return model.lm_head(model.model.norm(states))

    found: dict[str, float | None] = {}
    for name, work, count in (("layer", layers, LAYERS), ("head", head, 1)):
        found[f"{name}_ms"] = median_ms(work, device, 10) / count
        graph = None if device.type != "cuda" else record_graph(work)
        found[f"{name}_graph_ms"] = None if graph is None else median_ms(graph.replay, device, 20) / count
    return found


def record_graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record work that has been done before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
