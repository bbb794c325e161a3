"""Records of drafts in service, and figures of made-up measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.service.register import EvalFigures, InService, ServedDraft

TARGET, STRATEGY = "small", "eagle3"
WEIGHTS_OF_TARGET = "0123456789abcdef"
WHEN = "2026-05-01T12:00:00+00:00"


def served(name: str, target_digest: str = WEIGHTS_OF_TARGET) -> ServedDraft:
    return ServedDraft(name, f"eagle3_export/small/{name}", {"sglang": f"{name}-f"}, name, name, target_digest, name)


def record(
    number: int, name: str, figures: Sequence[EvalFigures] = (), target_digest: str = WEIGHTS_OF_TARGET
) -> InService:
    previous = None if number == 1 else "before"
    draft = served(name, target_digest)
    back = number - 1 or None
    return InService(
        number, TARGET, STRATEGY, "promote", draft, previous, back, "me", WHEN, "why", figures=tuple(figures)
    )


def draw_walk(
    mean: float, prompts: int, rng: np.random.Generator, ease: np.ndarray | None = None
) -> list[PromptAcceptance]:
    """Walks of 20 passes a prompt that accept `mean` of 5 tokens on average; `ease` shifts each prompt's own mean."""
    shift = np.zeros(prompts) if ease is None else ease
    found = []
    for index in range(prompts):
        chance = float(np.clip((mean + shift[index]) / 5, 0.01, 0.99))
        accepted = rng.binomial(5, chance, size=20).tolist()
        found.append(PromptAcceptance.from_accepted_counts(f"s{index}", accepted, sum(accepted) + 20))
    return found
