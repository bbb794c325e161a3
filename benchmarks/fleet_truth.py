"""True acceptance of made-up drafts, and measurements of it on prompts: what a simulated year of a fleet is judged by.

A prompt has an ease, which all drafts share, and each draft finds it a little easier or harder than that. So two drafts
on the same prompts are compared more precisely than on different ones, as with real drafts. The true value of a draft is
its accepted tokens per pass over all prompts that there could be, by quadrature; what is measured is the product's
`PromptAcceptance` of some prompts that were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance

DRAFT_TOKENS = 5
EASE, TASTE = 0.6, 0.2
"""Standard deviations between prompts: of what all drafts share, and of what one draft has for itself."""
SPREAD_OF_PASSES = 0.6
"""Variance of the accepted tokens of one pass, as a share of mean x (mean + 1), that of a geometric distribution."""
ANSWER_TOKENS, SPREAD_OF_ANSWERS = 200.0, 0.5
LEAST_PASSES = 4


@dataclass(frozen=True)
class Draft:
    """A made-up draft.

    Attributes:
        digest: its identity; its measurements are drawn from it, so measuring it again gives the same.
        trained_at: hour at which its training ended.
        made_by: `train` or `tune`.
        level: what it has over the fleet's usual draft, in accepted tokens per pass.
        by_eval_set: what is added to that on single eval sets.
        target_digest: weights that it was trained for.
        traffic: version of each eval set's traffic that it was trained on.
        start_from: draft that was tuned.
    """

    digest: str
    trained_at: float
    made_by: str
    level: float
    by_eval_set: dict[str, float]
    target_digest: str
    traffic: dict[str, int]
    start_from: str | None = None


@dataclass(frozen=True)
class EvalSet:
    """Prompts that were drawn from the traffic.

    Attributes:
        data: identity of the prompts and the target's answers: with another one no prompt has the same tokens.
        usual: accepted tokens per pass of the fleet's usual draft.
    """

    name: str
    data: str
    prompts: int
    usual: float


def measure(draft: Draft, mean: float, drawn: EvalSet, seed: int) -> tuple[PromptAcceptance, ...]:
    """Return the walk of a draft whose prompts have `mean` on average, before what is lost at 0 and at the limit."""
    shared = np.random.default_rng(_seed(seed, drawn.data))
    ease = shared.normal(0, EASE, drawn.prompts)
    tokens = ANSWER_TOKENS * shared.lognormal(0, SPREAD_OF_ANSWERS, drawn.prompts)
    own = np.random.default_rng(_seed(seed, drawn.data, draft.digest))
    values = _limit(mean + ease + own.normal(0, TASTE, drawn.prompts))
    passes = np.maximum(np.rint(tokens / (1 + values)), LEAST_PASSES).astype(int)
    noise = np.sqrt(SPREAD_OF_PASSES * passes * values * (1 + values))
    accepted = np.clip(np.rint(passes * values + own.normal(0, noise)), 0, passes * DRAFT_TOKENS).astype(int)
    return tuple(
        _count(f"p{index}", *pair) for index, pair in enumerate(zip(passes.tolist(), accepted.tolist(), strict=True))
    )


@cache
def true_value(mean: float) -> float:
    """Return the accepted tokens per pass over all prompts of a draft with `mean`, for answers of any length.

    Accepted tokens and passes are each summed first; a prompt that is easy has fewer passes.
    """
    points, weights = _find_nodes()
    values = _limit(mean + points * np.hypot(EASE, TASTE))
    passes = weights / (1 + values)
    return float((values * passes).sum() / passes.sum())


@cache
def _find_nodes() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.hermite_e.hermegauss(80)


def _limit(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0.05, DRAFT_TOKENS - 0.05)


def _count(sample_id: str, passes: int, accepted: int) -> PromptAcceptance:
    """Return the counts of a prompt, with as equal passes as there can be."""
    each, more = divmod(accepted, passes)
    histogram = [0] * (DRAFT_TOKENS + 1)
    histogram[each] = passes - more
    if more:
        histogram[each + 1] = more
    return PromptAcceptance(sample_id, passes, accepted, accepted + passes, tuple(histogram))


def _seed(seed: int, *names: str) -> Sequence[int]:
    return [seed, *(int.from_bytes(name.encode(), "little") for name in names)]
