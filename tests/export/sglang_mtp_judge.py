"""Runs SGLang's model on exported MTP layers: a judge of judges.py, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `embedding`, `head`, and for every question i `last.{i}` (n, H), `following.{i}`
(n,) and `drawn.{i}` (k,). The class that SGLang's server takes for such a draft loads the files, and says a token's
distribution k times, each after a drawn one more and fed the state that it said before. Only attention is not SGLang's: on a
CPU it has no kernel that goes without a server. Returns for every folder `architecture`, `log_probabilities` (k, V)
for every question, and `unset`, the parameters that no file gave a value.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel
from sglang_alone import Cache, PlainAttention, alone_on_a_cpu, load_export
from torch import Tensor, nn

RANKS = (
    "tp_rank",
    "attn_tp_rank",
    "attn_dp_rank",
    "attn_cp_rank",
    "moe_ep_rank",
    "moe_tp_rank",
    "moe_dp_rank",
    "pp_rank",
)
LENT = ["lm_head.weight", "model.embed_tokens.weight"]
"""What the target lends."""


class GrowingAttention(PlainAttention):
    """Remembers the keys and values that it was given."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any) -> Tensor:
        attended = super().forward(query, key, value, batch)
        old = self._cache.written[self.layer_id]
        self._cache.written[self.layer_id] = tuple(
            torch.cat([before, new.view(len(query), *before.shape[1:])]) for before, new in zip(old, (key, value))
        )
        return attended


class PlainBatch(SimpleNamespace):
    """One sequence; whatever else SGLang's layers ask for is not there."""

    def __getattr__(self, name: str) -> None:
        return None


class LastStates(nn.Module):
    """Replaces `LogitsProcessor`, which needs a server's batch."""

    def forward(self, input_ids: Tensor, states: Tensor, *others: Any) -> Tensor:
        return states


def loaded(folder: Path) -> tuple[str, nn.Module]:
    config = ModelConfig(str(folder), trust_remote_code=False, is_draft_model=True)
    kind, architecture = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    model = load_export(kind(config.hf_config), folder)
    model.logits_processor = LastStates()
    return architecture, model


def said(model: nn.Module, asked: dict[str, Tensor], question: int) -> list[list[float]]:
    """The distributions along a drawn chain after a context."""
    [attention_of] = [module for module in model.modules() if hasattr(module, "q_norm") and hasattr(module, "attn")]
    cache, attention = Cache(), attention_of.attn
    empty = torch.zeros(0, attention.tp_k_head_num, attention.head_dim)
    cache.set_kv_buffer(attention, None, empty, empty)
    attention_of.attn = GrowingAttention(attention, cache)
    states, tokens = asked[f"last.{question}"], asked[f"following.{question}"]
    begin, found = 0, []
    for drawn in asked[f"drawn.{question}"]:
        batch = PlainBatch(
            forward_mode=ForwardMode.EXTEND,
            contains_mm_inputs=lambda: False,
            spec_info=SimpleNamespace(hidden_states=states),
        )
        states = model(tokens, torch.arange(begin, begin + len(tokens)), batch)[-1:]
        found.append((states[0] @ asked["head"].T).log_softmax(-1).tolist())
        begin, tokens = begin + len(tokens), drawn[None]
    attention_of.attn = attention
    return found


def judged(folder: Path) -> dict[str, Any]:
    (architecture, model), asked = loaded(folder), load_file(folder.with_suffix(".safetensors"))
    unset = sorted(name for name, parameter in model.named_parameters() if bool(parameter.isnan().any()))
    assert unset == LENT, unset
    model.model.embed_tokens.weight.data.copy_(asked["embedding"])
    questions = range(sum(name.startswith("drawn.") for name in asked))
    return {"architecture": architecture, "log_probabilities": [said(model, asked, each) for each in questions]}


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    alone_on_a_cpu(work)
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    return [judged(folder) for folder in folders]
