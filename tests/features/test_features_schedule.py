"""Schedules: what a step holds does not depend on how it is cut into pieces."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.features.schedule import EvaluationSchedule, PaddedTrainSchedule


@st.composite
def cuttings(draw):
    """A set, and two ways to cut its global batch."""
    micro, world, accumulation = (draw(st.integers(1, 4)) for _ in range(3))
    batch = micro * world * accumulation
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    other_micro = draw(st.sampled_from(divisors))
    other_world = draw(st.sampled_from([d for d in divisors if batch // other_micro % d == 0]))
    samples = draw(st.integers(batch, batch * 5))
    return samples, batch, (micro, world), (other_micro, other_world)


def padded(samples: int, micro: int, batch: int, rank: int = 0, world: int = 1, seed: int = 0) -> PaddedTrainSchedule:
    return PaddedTrainSchedule(
        samples=samples, micro_batch_size=micro, global_batch_size=batch, rank=rank, world=world, seed=seed
    )


def steps(samples: int, batch: int, micro: int, world: int, seed: int, epoch: int) -> list[list[int]]:
    schedules = [padded(samples, micro, batch, rank, world, seed) for rank in range(world)]
    plans = [list(schedule.batches(epoch)) for schedule in schedules]
    accumulation = schedules[0].accumulation
    assert all(len(plan) == schedules[0].steps * accumulation for plan in plans)
    taken = []
    for step in range(schedules[0].steps):
        micro_batches = [plan[step * accumulation : (step + 1) * accumulation] for plan in plans]
        assert all([b.ends_step for b in each] == [False] * (accumulation - 1) + [True] for each in micro_batches)
        taken.append(sorted(i for each in micro_batches for b in each for i in b.indices))
    return taken


@given(cuttings(), st.integers(0, 3), st.integers(0, 3))
def test_samples_of_a_step_depend_neither_on_ranks_nor_on_micro_batch(case, seed, epoch):
    samples, batch, one, other = case
    first = steps(samples, batch, *one, seed, epoch)
    assert first == steps(samples, batch, *other, seed, epoch)
    assert all(len(step) == batch for step in first)
    assert max(Counter(i for step in first for i in step).values()) == 1
    assert len(first) == samples // batch


def test_order_is_a_function_of_seed_and_epoch():
    base = padded(50, 2, 2, seed=1)
    assert list(base.batches(0)) == list(padded(50, 2, 2, seed=1).batches(0))
    assert list(base.batches(0)) != list(base.batches(1))
    assert list(base.batches(0)) != list(padded(50, 2, 2, seed=2).batches(0))


@given(cuttings(), st.integers(0, 5))
def test_what_comes_after_some_steps_is_the_rest_of_the_epoch(case, after):
    samples, batch, (micro, world), _ = case
    schedule = padded(samples, micro, batch, world - 1, world)
    whole = list(schedule.batches(1))
    assert list(schedule.batches(1, after)) == whole[after * schedule.accumulation :]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_evaluation_takes_every_sample_exactly_once_in_equal_batch_counts(samples, micro, world):
    plans = [list(EvaluationSchedule(samples, micro, rank, world).batches()) for rank in range(world)]
    real = [i for plan in plans for batch in plan if not batch.padding for i in batch.indices]
    assert sorted(real) == list(range(samples))
    assert len({len(plan) for plan in plans}) == 1
    assert all(batch.indices for plan in plans for batch in plan)


def test_impossible_batches_are_refused():
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size 2 x ranks 2"):
        padded(50, 2, 6, world=2)
    with pytest.raises(ConfigError, match="global_batch_size 8 is larger than the set of 7 samples"):
        padded(7, 1, 8)
