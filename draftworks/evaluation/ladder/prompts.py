"""Prompts of the eval set that rung 4 decodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftworks.data.token_rows import TokenRow
from draftworks.evaluation.ladder.replay import find_answer_spans


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: the tokens before the first answer."""

    sample_id: str
    tokens: tuple[int, ...]


def select_prompts(tokens: Iterable[TokenRow], count: int) -> list[Prompt]:
    """Prompts of the first `count` samples by id, which is a hash: the same choice for every draft."""
    found = []
    for row in sorted(tokens, key=lambda row: row.sample_id):
        begin = next((span[0] for span in find_answer_spans(row.loss_mask)), 0)
        if begin > 0 and len(found) < count:
            found.append(Prompt(row.sample_id, tuple(row.input_ids[:begin].tolist())))
    return found
