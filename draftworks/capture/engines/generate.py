"""Batched decoding in which the response to a prompt does not depend on the other prompts of the batch.

Small Llama models on a CPU take steps of their own (`llama_steps.py`), all others those of transformers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from draftworks.capture.engine import Advance, AskedPrompt, Generated
from draftworks.capture.engines.llama_steps import find_steps
from draftworks.capture.engines.running_batch import RunningBatch, find_budget
from draftworks.config.registry_files import ResponseSpec


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: ResponseSpec,
    sample_ids: Sequence[str],
    max_total: int,
    turn: int = 0,
    end_ids: Collection[int] = (),
) -> list[Generated]:
    """Let the model continue each prompt until it ends its turn.

    Args:
        sampling: limits and sampling options; `batch_size` prompts are decoded together.
        sample_ids: one per prompt; a batch row's random numbers derive from it and `turn`.
        max_total: largest number of tokens of prompt and response together.
        end_ids: ids that end a turn, in addition to those of the model's configuration.

    Returns:
        Responses in the order of the prompts. A prompt that leaves no room gets an empty, unfinished response.

    Raises:
        CaptureError: a prompt is empty.
    """
    asked = [AskedPrompt(each, tuple(prompt), turn) for each, prompt in zip(sample_ids, prompts, strict=True)]
    waiting = deque(sorted(asked, key=lambda each: -len(each.prompt)))
    found = {
        answered.asked: answered.answer
        for advance in answer_stream(model, waiting, sampling, max_total, end_ids)
        for answered in advance.answered
    }
    return [found[each] for each in asked]


@torch.inference_mode()
def answer_stream(
    model: PreTrainedModel,
    waiting: deque[AskedPrompt],
    sampling: ResponseSpec,
    max_total: int,
    end_ids: Collection[int] = (),
    budget: int | None = None,
) -> Iterator[Advance]:
    """Answer what is waiting, from its left, and what is added meanwhile; yield what each pass of the model did.

    Arguments and errors are those of `generate`.

    Args:
        budget: bytes of keys and values of the answers that run; None is `find_budget`.
    """
    end_tokens = find_end_tokens(model).union(end_ids)
    budget = find_budget(model) if budget is None else budget
    yield from RunningBatch(model, sampling, max_total, end_tokens, find_steps(model), budget).run(waiting)


def find_end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a turn, from the generation configuration or else from the model's configuration."""
    ids: Any = None
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None) if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or ())
