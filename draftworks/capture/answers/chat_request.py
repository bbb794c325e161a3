"""What a chat server is asked for: our options under its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftworks.config.responses import ResponseSpec
from draftworks.data.conversations import Turn


def request_fields(
    sampling: ResponseSpec,
    model: str,
    end_ids: Sequence[int],
    template_options: Mapping[str, bool],
) -> dict[str, Any]:
    """What all requests have in common.

    Every option that a server knows is sent even where it is off: left out, the model's generation_config.json decides. The
    penalties that OpenAI knows, presence and frequency, are added to logits; none of them is our multiplicative one.

    Args:
        sampling: with an endpoint.
        end_ids: ids that end an answer.
        template_options: what the chat template is told beside the messages.
    """
    endpoint = sampling.endpoint
    assert endpoint is not None
    fields: dict[str, Any] = {"model": model, "temperature": sampling.temperature, "top_p": sampling.top_p}
    if endpoint.server == "openai":
        return fields
    fields |= {
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(end_ids),
    }
    if template_options:
        fields["chat_template_kwargs"] = dict(template_options)
    if endpoint.token_ids:
        fields["return_token_ids"] = True
    if endpoint.server == "sglang":
        fields["separate_reasoning"] = False
    return fields


def messages_of(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Turns as chat servers take them."""
    return [{"role": turn.role, "content": turn.content} for turn in turns]
