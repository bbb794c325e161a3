"""Builds SGLang's configuration of exported drafts: a judge of judges.py, under SGLang's own Python.

Returns for each folder what the class that its server builds for a draft model says, or {"refused": reason}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.registry import ModelRegistry


def read(folder: str) -> dict[str, Any]:
    try:
        config = ModelConfig(folder, trust_remote_code=False, is_draft_model=True)
        _, architecture = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    except Exception as error:  # whatever way it has to refuse
        return {"refused": f"{type(error).__name__}: {error}"}
    return {
        "architecture": architecture,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "dtype": str(config.dtype).removeprefix("torch."),
        "context_len": config.context_len,
    }


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    return [read(str(folder)) for folder in folders]
