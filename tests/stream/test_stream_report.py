"""The figures of a running stream add up, and name the side that waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from test_stream_streaming_plan import plans, refs_with

from draftworks.stream.metadata_store import Watermark
from draftworks.stream.streaming_plan import StreamingPlan, StreamOrder
from draftworks.stream.training_stream import StreamReport


@dataclass
class Side:
    """Stands for the store, the clock and the trainer's waiting."""

    keys: set[str] = field(default_factory=set)
    now: float = 0.0
    waited_s: float = 0.0

    def refresh(self) -> None:
        pass

    def find_missing(self, keys):
        return [key for key in keys if key not in self.keys]

    def report(self, plan: StreamingPlan) -> StreamReport:
        return StreamReport(plan, self, lambda: self.waited_s, lambda: self.now)  # type: ignore[arg-type]


@given(plans(), st.data())
def test_what_is_captured_is_used_or_ahead_and_stays_below_the_watermark(plan, data):
    step = data.draw(st.integers(0, plan.order.total_steps))
    side = Side({key for ref in plan.refs for key in ref.feature_keys.values()})
    found = side.report(plan).measure(step)
    if plan.watermark.samples is not None:
        assert found["ahead_samples"] <= plan.watermark.samples
    assert plan.count_new_tokens(0) == 0
    assert plan.count_new_tokens(plan.order.total_steps) == plan.captured_tokens
    used = {ref.feature_keys["last"] for s in range(1, step + 1) for ref in plan.get_refs(plan.get_sample_ids(s))}
    if plan.keep == "until_last_use":
        assert plan.count_new_tokens(step) == sum(int(key[1:]) + 1 for key in used)
        assert used.isdisjoint(ref.feature_keys["last"] for ref in plan.find_ahead(step))


def test_the_side_that_waits_is_named():
    plan = StreamingPlan(refs_with([0, 1, 2, 3, 4, 5]), StreamOrder(6, 1, 0, 6), Watermark(samples=2))
    side = Side()
    report = side.report(plan)
    assert report.measure(0) == {"ahead_samples": 0, "ahead_mb": 0.0}
    side.now, side.waited_s = 10.0, 4.0
    assert report.measure(1)["waiting"] == "trainer:40%"
    side.now, side.keys = 20.0, {f"k{i}" for i in range(6)}
    full = report.measure(2)
    assert (full["waiting"], full["ahead_samples"]) == ("producers", 2)
    tokens = plan.count_new_tokens(2) + sum(ref.num_tokens for ref in plan.find_ahead(2)) - plan.count_new_tokens(1)
    assert full["captured_tokens/s"] == round(tokens / 10)
    side.now, side.keys = 30.0, {plan.find_ahead(3)[0].feature_keys["last"]}
    assert report.measure(3)["waiting"] == "nobody"
