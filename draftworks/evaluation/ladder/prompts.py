"""Prompts of the eval set that rung 4 decodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftworks.data.tokenized import TokenRow
from draftworks.evaluation.ladder.replay import find_answer_spans


@dataclass(frozen=True)
class Prompt:
    """Tokens of a sample before its first answer."""

    sample_id: str
    tokens: tuple[int, ...]


def select_prompts(samples: Iterable[TokenRow], count: int) -> list[Prompt]:
    """Return the prompts of the first `count` samples by id; ids are hashes, so every draft gets the same prompts.

    Samples without a prompt or without an answer are skipped.
    """
    prompts = []
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        begin = next((span[0] for span in find_answer_spans(sample.loss_mask)), 0)
        if begin > 0 and len(prompts) < count:
            prompts.append(Prompt(sample.sample_id, tuple(sample.input_ids[:begin].tolist())))
    return prompts
