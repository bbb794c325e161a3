"""The tap hf0 of an engine that gives no embeddings: when it is no more than rows of the target's input matrix.

By definition hf0 is what enters the first decoder layer. Some models scale, normalise or add to what they look up, each
in its own way, so the model's own code is run up to that layer, without weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftworks.capture.engines.hf import decoder_layers
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError


def require_plain_embeddings(target: TargetFiles) -> None:
    """CaptureError unless `hidden_states[0]` of transformers are rows of the target's input matrix, as they are."""
    refused = f"target {target.name}: tap hf0, the embeddings, cannot be captured with this backend"
    advice = "Capture with backend hf, or choose other layers"
    try:
        config = AutoConfig.from_pretrained(target.model, revision=target.revision or "main", trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        plain = has_plain_embeddings(model)
    except (ConfigError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise CaptureError(
            f"{refused}: what the model does to them cannot be found out: {type(error).__name__}: {error}. {advice}"
        ) from error
    if not plain:
        raise CaptureError(
            f"{refused}: {type(model).__name__} does more to them than to look them up (a scale, a norm). {advice}"
        )


def has_plain_embeddings(model: PreTrainedModel) -> bool:
    """Whether what enters the first decoder layer is what the embedding looked up. The model may be on device meta."""
    embedding = model.get_input_embeddings()
    looked_up: list[Tensor] = []
    hooks = [
        embedding.register_forward_hook(lambda module, args, output: looked_up.append(output)),
        decoder_layers(model)[0].register_forward_pre_hook(_arrive, with_kwargs=True),
    ]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    except _ArrivedError as arrived:
        return type(embedding) is nn.Embedding and len(looked_up) == 1 and arrived.states is looked_up[0]
    finally:
        for hook in hooks:
            hook.remove()
    return False


class _ArrivedError(Exception):
    """Ends a forward pass at the first layer."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("the first layer is reached")
        self.states = states


def _arrive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ArrivedError(args[0] if args else kwargs["hidden_states"])
