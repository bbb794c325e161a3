"""Made-up pairs of drafts whose true difference is known, and how often the rule of promotion errs on samples of prompts.

A world is a population of prompts with the walks of two drafts. A trial draws prompts of it without replacement, so the
truth is the difference over the whole population. A pass accepts n of at most 6 tokens with the chance of at least n being
rate to the power n; of the passes of both drafts on a prompt a share is decided by the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import PairedDifference, Resampling, paired_difference
from draftworks.evaluation.report.paired_slices import PairedSlice, examine_slice
from draftworks.service.register import EvalFigures
from draftworks.service.rule import Compared, Margins, Ranked, Verdict, judge_eval_set, judge_slices

TOKENS_PER_PASS = 6
POPULATION = 10_000
FEWEST_PASSES, MOST_PASSES, LONGEST_WALK = 20, 200, 600
BEST = "best"

Effects = Callable[[np.random.Generator, np.ndarray], np.ndarray]
"""From the accepted tokens per pass of the best draft on every prompt to those of the new one."""


@dataclass(frozen=True)
class World:
    """A population of prompts with the walks of the new draft and of the best one.

    Attributes:
        shared: share of the passes that the same draws decide.
    """

    name: str
    effects: Effects
    shared: float = 0.7
    seed: int = 0

    @cached_property
    def walks(self) -> tuple[list[PromptAcceptance], list[PromptAcceptance]]:
        """The walks of the new draft and of the best one, prompt by prompt."""
        rng = np.random.default_rng(self.seed)
        means = _to_mean(1 / (1 + np.exp(-rng.normal(0.3, 0.5, POPULATION))))
        passes = np.exp(rng.normal(4.2, 0.6, POPULATION)).clip(FEWEST_PASSES, MOST_PASSES).astype(int)
        changed = self.effects(rng, means).clip(0, TOKENS_PER_PASS)
        tokens = passes * (1 + means)
        lengths = (tokens / (1 + changed)).round().astype(int).clip(1, LONGEST_WALK)
        draws = rng.random((POPULATION, LONGEST_WALK))
        own = np.where(rng.random(draws.shape) < self.shared, draws, rng.random(draws.shape))
        return _walk(changed, lengths, draws), _walk(means, passes, own)

    @cached_property
    def truth(self) -> float:
        """Accepted tokens per pass of the new draft minus those of the best one."""
        new, best = map(micro_mean, self.walks)
        assert new is not None
        assert best is not None
        return new - best


@dataclass(frozen=True)
class Errors:
    """Shares of trials.

    Attributes:
        covered: those whose interval has the truth.
        promoted: those in which the rule promotes the new draft.
    """

    prompts: int
    covered: float
    promoted: float


def measure_errors(world: World, prompts: int, trials: int, margin: float | None = None, seed: int = 1) -> Errors:
    """Draw samples of so many prompts and let the rule judge each.

    Args:
        margin: what a draft may lose; by default what it does lose, so that every promotion is a wrong one.
    """
    allowed = -world.truth if margin is None else margin
    covered = promoted = 0
    for paired in draw_differences(world, prompts, trials, seed):
        covered += paired.interval.low <= world.truth <= paired.interval.high and paired.interval.has_width
        promoted += is_promoted(paired, allowed)
    return Errors(prompts, covered / trials, promoted / trials)


def draw_differences(world: World, prompts: int, trials: int, seed: int = 1) -> list[PairedDifference]:
    """Return the difference of the two drafts on samples of prompts."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(POPULATION, prompts, replace=False) for _ in range(trials)]
    new, best = world.walks
    return [
        paired_difference([new[i] for i in each], [best[i] for i in each], Resampling(seed=trial))
        for trial, each in enumerate(chosen)
    ]


def measure_held_back(world: World, slices: int, prompts: int, trials: int, margin: float, seed: int = 1) -> float:
    """Return the share of trials in which a slice holds a draft back: so many slices of so many prompts each."""
    rng = np.random.default_rng(seed)
    new, best = world.walks
    held = 0
    for trial in range(trials):
        parts = rng.choice(POPULATION, (slices, prompts), replace=False)
        paired = [
            PairedSlice("part", str(number), tuple(new[i] for i in part), tuple(best[i] for i in part))
            for number, part in enumerate(parts)
        ]
        found = [examine_slice(one, slices, Resampling(seed=trial)) for one in paired]
        [figures] = judge_slices([EvalFigures("heldout", Verdict.NON_INFERIOR, 0.03)], {"heldout": found}, margin)
        held += not Verdict(figures.verdict).accepts
    return held / trials


def is_promoted(paired: PairedDifference, margin: float) -> bool:
    """Whether the rule promotes a draft with other weights, whatever the number of prompts."""
    compared = {BEST: Compared(paired)}
    found = judge_eval_set("heldout", [Ranked(BEST, 0.0)], compared, Margins(margin, 1), is_known=True)
    return Verdict(found.verdict).accepts


def _shift(mean: float, spread: Callable[[np.random.Generator, int], np.ndarray]) -> Effects:
    return lambda rng, means: means + mean + spread(rng, len(means))


def _draw_skewed(rng: np.random.Generator, size: int) -> np.ndarray:
    """Small gains on most prompts, large losses on few; the mean is 0."""
    return 0.3 * (0.5 - rng.gamma(0.5, 1.0, size))


def _lose(share: float) -> Effects:
    """Nothing is accepted on a share of the prompts any more."""
    return lambda rng, means: np.where(rng.random(len(means)) < share, 0.0, means)


LOSS = -0.03
MILD = World("mild", _shift(LOSS, lambda rng, size: rng.normal(0, 0.05, size)))
SKEWED = World("skewed", _shift(LOSS, _draw_skewed))
HEAVY = World("heavy tails", _shift(LOSS, lambda rng, size: 0.08 * rng.standard_t(2.5, size)))
LOST = World("1 prompt in 20 lost", _lose(0.05))
LOST_ALONE = World("1 in 20 lost, others equal", _lose(0.05), shared=1.0)
WORLDS = (MILD, SKEWED, HEAVY, LOST, LOST_ALONE)
EQUAL = World("equal", _shift(0.0, lambda rng, size: rng.normal(0, 0.05, size)))
"""No draft is better than the other, and on no prompt they are the same."""
EQUAL_SKEWED = World("equal, skewed", _shift(0.012, lambda rng, size: 0.15 * (rng.exponential(size=size) - 1)))
"""Small losses on most prompts, large gains on few, so that few prompts mostly show a loss. A draft that accepts less has more
passes, which count: the mean over prompts is raised until the difference of the sums is 0."""
EQUALS = (EQUAL, EQUAL_SKEWED)


def _to_mean(rates: np.ndarray) -> np.ndarray:
    return sum(rates**n for n in range(1, TOKENS_PER_PASS + 1))  # pyright: ignore[reportReturnType]


def _walk(means: np.ndarray, passes: Sequence[int] | np.ndarray, draws: np.ndarray) -> list[PromptAcceptance]:
    grid = np.linspace(0, 1, 2001)
    rates = np.interp(means, _to_mean(grid), grid).clip(1e-12, 1 - 1e-12)
    accepted = np.minimum(np.log(draws) / np.log(rates)[:, None], TOKENS_PER_PASS).astype(int)
    found = []
    for number, (counts, length) in enumerate(zip(accepted, passes)):
        histogram = np.bincount(counts[: int(length)], minlength=TOKENS_PER_PASS + 1)
        total = int(counts[: int(length)].sum())
        found.append(
            PromptAcceptance(f"s{number:05}", int(length), total, total + int(length), tuple(histogram.tolist()))
        )
    return found
