"""Producers capture every content once and in time, inside the watermark, and nothing is freed that is still needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.features.contracts import SampleRef
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.streaming_plan import StreamingPlan, StreamOrder

KEEPS = ["until_last_use", "capture_again"]


def refs_with(contents: list[int]) -> list[SampleRef]:
    """Samples whose content has so many tokens as its number, and ten bytes a token."""
    return [
        SampleRef(f"s{i}", "run", "t", "mem://", {"last": f"k{c}"}, {}, num_tokens=c + 1, estimated_bytes=10 * (c + 1))
        for i, c in enumerate(contents)
    ]


@st.composite
def plans(draw: st.DrawFn) -> StreamingPlan:
    contents = draw(st.lists(st.integers(0, 9), min_size=1, max_size=16))
    batch = draw(st.integers(1, len(contents)))
    steps = draw(st.integers(1, 3 * (len(contents) // batch)))
    limits = Watermark(
        samples=draw(st.one_of(st.none(), st.integers(batch, 20))),
        bytes=draw(st.one_of(st.none(), st.integers(100 * batch, 2000))),
        steps=draw(st.integers(1, 6)),
    )
    order = StreamOrder(len(contents), batch, draw(st.integers(0, 3)), steps)
    return StreamingPlan(refs_with(contents), order, limits, draw(st.sampled_from(KEEPS)))


@given(plans(), st.integers(1, 40))
def test_a_walk_through_the_plan_finds_every_feature_and_never_holds_more_than_it_says(plan, batch_tokens):
    """A model of the runtime: producers are as far ahead as they may be, the trainer frees at every step."""
    held, most, sizes = set(), 0, {ref.feature_keys["last"]: ref.estimated_bytes for ref in plan.refs}
    waiting = list(plan.groups)
    for acked in range(plan.order.total_steps):
        end = plan.find_window_end(acked)
        while waiting and waiting[0].last <= end:
            for task in plan.make_tasks(waiting.pop(0), "run", batch_tokens):
                assert task.step <= end
                held.update(job.keys["last"] for job in plan.list_jobs(task))
        most = max(most, sum(sizes[key] for key in held))
        needed = {ref.feature_keys["last"] for ref in plan.get_refs(plan.get_sample_ids(acked + 1))}
        assert needed <= held
        assert {ref.feature_keys["last"] for ref in plan.find_needed(acked)} >= needed
        held -= set(plan.find_freed(acked + 1, acked + 1))
    assert not waiting
    assert not held
    assert most <= plan.peak_bytes


def test_groups_grow_with_the_steps_before_them_up_to_half_the_watermark():
    """Two samples a step; without a limit a group is an eighth of what is before it, with one of 8 samples two steps."""
    order = StreamOrder(80, 2, 0, 40)
    sizes = {
        samples: [group.last - group.first + 1 for group in make_plan(order, samples).groups] for samples in (8, 10**9)
    }
    assert sizes[8] == [1] * 16 + [2] * 12
    assert sizes[10**9] == [1] * 16 + [2, 2, 2, 2, 3, 3, 3, 4, 3]


def make_plan(order: StreamOrder, samples: int) -> StreamingPlan:
    return StreamingPlan(refs_with(list(range(80))), order, Watermark(samples=samples))


@given(plans(), st.integers(1, 40))
def test_tasks_name_every_used_sample_once_in_a_lifetime(plan, batch_tokens):
    tasks = [task for group in plan.groups for task in plan.make_tasks(group, "run", batch_tokens)]
    assert len({task.task_id for task in tasks}) == len(tasks)
    steps = range(1, plan.order.total_steps + 1)
    used = {key for step in steps for key in map(content_of, plan.get_refs(plan.get_sample_ids(step)))}
    named = [key for task in tasks for key in {content_of(ref) for ref in plan.get_refs(task.sample_ids)}]
    assert set(named) == used
    epochs = 1 if plan.keep == "until_last_use" else plan.order.epochs
    assert max(map(named.count, used)) <= epochs
    assert sum(task.num_tokens for task in tasks) == plan.captured_tokens


def content_of(ref: SampleRef) -> str:
    return ref.feature_keys["last"]


@given(plans())
def test_what_is_ahead_of_the_trainer_stays_below_the_watermark(plan):
    for acked in range(plan.order.total_steps):
        end = plan.find_window_end(acked)
        new = [i for g in plan.groups for i in plan.make_tasks(g, "run", 100) if acked < g.first and g.last <= end]
        jobs = [job for task in new for job in plan.list_jobs(task)]
        assert plan.watermark.samples is None or len(jobs) <= plan.watermark.samples
        assert plan.watermark.bytes is None or sum(10 * job.num_tokens for job in jobs) <= plan.watermark.bytes
        assert end - acked <= plan.watermark.steps


def test_a_watermark_below_a_global_batch_is_refused():
    with pytest.raises(ConfigError, match=r"watermark\.samples: expected at least one global batch, 4"):
        StreamingPlan(refs_with([1, 2, 3, 4, 5]), StreamOrder(5, 4, 0, 1), Watermark(samples=3))
