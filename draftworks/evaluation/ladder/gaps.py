"""How near a tie a greedy choice was: the gap between the two largest logits, worked out again for one position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator
from transformers import PreTrainedModel

from draftworks.drafts.strategy import DraftStrategy
from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.target_session import TargetSession
from draftworks.storage.identity import LayerTap

NEARLY_GREEDY = 1 / 16
"""A temperature at which a draft says its best guesses, and at which gaps up to 5 have probabilities in float32."""
TRIES = 16


def with_gap(
    difference: Difference,
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Difference:
    """The difference with its gap, of the target or of the draft.

    Args:
        answer: to `prompt`, as the loop gave it.
    """
    if difference.place is None:
        gap = target_gap(model, [*prompt, *answer[: difference.position]])
    else:
        said, guesses = difference.position - difference.place, difference.place
        gap = draft_gap(model, strategy, taps, [*prompt, *answer[:said]], answer[said : said + guesses])
    return replace(difference, gap=gap)


def target_gap(model: PreTrainedModel, tokens: Sequence[int]) -> float | None:
    """Of what the target says after `tokens`; None where the second largest logit is minus infinity."""
    largest = TargetSession(model).read(tokens).logits[-1].double().topk(2).values
    return _finite(float(largest[0] - largest[1]))


def draft_gap(
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    tokens: Sequence[int],
    guesses: Sequence[int],
) -> float | None:
    """Of what the draft proposes next, when the target has said `tokens` and it has proposed `guesses` after them.

    A drafter hands out no logits but the probabilities it drew from, q = softmax(logits / T). So it is asked at a
    temperature T that leaves doubt about near ties only, and the gap is T · log(q1 / q2).

    Returns:
        None where the draft did not repeat these guesses, or where the gap is too large for a probability.
    """
    features = TargetSession(model, taps).read(tokens[:-1]).features
    following = torch.tensor(tokens[1:], device=model.device)
    generator = Generator(model.device).manual_seed(0)
    for _ in range(TRIES):
        drafter = strategy.drafter()
        drafter.extend(features, following)
        proposal = drafter.propose(len(guesses) + 1, NEARLY_GREEDY, generator)
        if proposal.tokens[:-1].tolist() == list(guesses):
            likeliest = proposal.probabilities[-1].double().topk(2).values
            return _finite(NEARLY_GREEDY * float(likeliest.log().diff().neg()))
    return None


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None
