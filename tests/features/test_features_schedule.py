"""Schedules: what a step holds does not depend on how it is cut into pieces."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.features.schedule import EvaluationSchedule, PaddedTrainSchedule, find_left_out

COMPLETE_ORDER = [[[7, 0], [2, 1], [4, 6], [5, 3]], [[5, 1], [2, 4], [0, 7], [8, 6]]]
"""Nine samples in steps of two with seed 3, epochs 0 and 1: the order of trainings that exist."""


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


def test_the_order_of_a_complete_set_is_that_of_every_training_before():
    schedule = padded(9, 2, 2, seed=3)
    assert [schedule.samples_of_steps(epoch).tolist() for epoch in (0, 1)] == COMPLETE_ORDER


@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_leaving_samples_out_moves_no_other_before_their_own_place(data, batch, seed, epoch):
    ids = [f"s{i}" for i in range(data.draw(st.integers(batch, 30)))]
    bad = data.draw(st.sets(st.sampled_from(ids), max_size=len(ids) - batch))
    left = [each for each in ids if each not in bad]
    left_out = find_left_out(ids, left)
    complete = padded(len(ids), 1, batch, seed=seed)
    without = PaddedTrainSchedule(
        samples=len(left), left_out=left_out, micro_batch_size=1, global_batch_size=batch, seed=seed
    )
    before = [[ids[index] for index in step] for step in complete.samples_of_steps(epoch)]
    after = [[left[index] for index in step] for step in without.samples_of_steps(epoch)]
    same = next((place for place, step in enumerate(before) if not bad.isdisjoint(step)), len(before))
    assert after[:same] == before[: min(same, len(after))]
    kept = [each for step in before for each in step if each not in bad]
    assert [each for step in after for each in step][: len(kept)] == kept[: len(after) * batch]


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
