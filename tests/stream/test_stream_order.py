"""A stream's order is the trainer's own schedule, and a lifetime covers exactly the steps that use a content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.features.schedule import PackedTrainSchedule, PaddedTrainSchedule
from draftworks.stream.streaming_plan import StreamOrder, find_lifetimes


@st.composite
def orders(draw: st.DrawFn) -> StreamOrder:
    samples = draw(st.integers(1, 30))
    batch = draw(st.integers(1, samples))
    return StreamOrder(samples, batch, draw(st.integers(0, 5)), draw(st.integers(1, 3 * (samples // batch))))


def test_steps_take_the_samples_of_the_padded_and_the_packed_schedule_on_any_ranks():
    order = StreamOrder(samples=13, global_batch_size=4, seed=7, total_steps=8)
    for rank_count in (1, 2):
        padded = [
            PaddedTrainSchedule(
                samples=13, global_batch_size=4, micro_batch_size=2, seed=7, rank=rank, world=rank_count
            )
            for rank in range(rank_count)
        ]
        packed = [
            PackedTrainSchedule(
                samples=13, global_batch_size=4, lengths=(9,) * 13, pack_tokens=20, seed=7, rank=rank, world=rank_count
            )
            for rank in range(rank_count)
        ]
        for schedules in (padded, packed):
            for step in range(1, 9):
                taken = [
                    index
                    for schedule in schedules
                    for batch in schedule.split_step(schedule.samples_of_steps((step - 1) // 3)[(step - 1) % 3])
                    if not batch.padding
                    for index in batch.indices
                ]
                assert sorted(taken) == sorted(order.get_samples(step).tolist())


@given(orders(), st.data(), st.sampled_from(["until_last_use", "capture_again"]))
def test_a_lifetime_begins_with_the_first_and_ends_with_the_last_step_of_its_content(order, data, keep):
    kinds = data.draw(st.integers(1, order.samples))
    of = [index % kinds for index in range(order.samples)]
    uses: dict[tuple[int, int], list[int]] = {}
    for step in range(1, order.total_steps + 1):
        epoch = order.get_epoch(step) if keep == "capture_again" else 0
        for sample in order.get_samples(step):
            uses.setdefault((epoch, of[sample]), []).append(step)
    found = {
        (number, content): (lifetime.first[content], lifetime.last[content])
        for number, lifetime in enumerate(find_lifetimes(order, of, keep))
        for content in np.flatnonzero(lifetime.first)
    }
    assert found == {key: (min(steps), max(steps)) for key, steps in uses.items()}


def test_a_global_batch_larger_than_the_set_is_refused():
    with pytest.raises(ConfigError, match="larger than the set"):
        StreamOrder(samples=3, global_batch_size=4, seed=0, total_steps=1)
