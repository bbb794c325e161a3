"""Passes by their place in the text, in ranges with edges at powers of two: a draft may know short contexts only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draftworks.evaluation.ladder.prompt_acceptance import Pass, PromptAcceptance

FIRST_EDGE = 256
"""End of the first range."""

PromptsByPosition = Mapping[int, tuple[PromptAcceptance, ...]]
"""From the begin of a range to the prompts with a pass in it, each with its passes there alone."""


@dataclass(frozen=True)
class PlacedPass:
    """A pass, and the place in the sample of the first token that it proposed, counted from 0."""

    place: int
    result: Pass


def find_range_begin(place: int) -> int:
    """Return the begin of the range that a place is in: 0, 256, 512, 1024, …"""
    return 0 if place < FIRST_EDGE else 1 << (place.bit_length() - 1)


def describe_range(begin: int) -> str:
    """Return the range that begins there as `256-511`, both included."""
    return f"{begin}-{max(2 * begin, FIRST_EDGE) - 1}"


def split_by_position(sample_id: str, passes: Iterable[PlacedPass]) -> dict[int, PromptAcceptance]:
    """Return the acceptance of one sample in each range that it has a pass in, by the begin of the range."""
    found: dict[int, list[Pass]] = {}
    for one in passes:
        found.setdefault(find_range_begin(one.place), []).append(one.result)
    return {begin: PromptAcceptance.of(sample_id, found[begin]) for begin in sorted(found)}


def join_samples(samples: Iterable[Mapping[int, PromptAcceptance]]) -> dict[int, tuple[PromptAcceptance, ...]]:
    """Return the prompts of every range, ascending, from the ranges of every sample."""
    joined: dict[int, list[PromptAcceptance]] = {}
    for sample in samples:
        for begin, prompt in sample.items():
            joined.setdefault(begin, []).append(prompt)
    return {begin: tuple(joined[begin]) for begin in sorted(joined)}
