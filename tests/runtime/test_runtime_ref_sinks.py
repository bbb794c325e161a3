"""As many samples are reserved as fit below the watermark, at least one; and a stream that is over takes none."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataflow_toys import toy_slim_ref
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import SampleRefQueue
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import StoreError
from draftworks.runtime.ref_sinks import ChannelSink, QueueSink

REFS = [toy_slim_ref(f"s{number}") for number in range(9)]
ONE = InFlight.of(REFS[:1])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 8))
def test_reserved_is_what_fits(samples: int, wanted: int, before: int):
    before = min(before, samples - 1)
    queue = SampleRefQueue(Watermark(samples))
    queue.put(REFS[:before])
    assert QueueSink(queue).reserve([ONE] * wanted, lambda: False) == min(wanted, samples - before)


def test_a_full_stream_is_waited_for_until_somebody_stops_or_ends_it(tmp_path: Path):
    queue = SampleRefQueue(Watermark(samples=2))
    sink = QueueSink(queue)
    sink.publish(REFS[:2])
    assert sink.has_seen("s1")
    assert sink.reserve([ONE], lambda: True) == 0
    queue.close()
    assert sink.is_over
    assert sink.reserve([ONE], lambda: False) == 0

    channel = StreamingRefChannel(tmp_path, idle_timeout_s=HANG_S)
    with ChannelSink(channel, Watermark(samples=2)) as sink:
        sink.publish(REFS[:2])
        sink.publish(REFS[:2])
        assert sink.reserve([ONE], lambda: True) == 0
        with channel.open_consumer() as reader:
            assert len(reader.poll()) == 2
            reader.mark_consumed(InFlight.of(REFS[:1]))
            assert sink.reserve([ONE] * 3, lambda: False) == 1
        assert sink.is_over
        assert sink.reserve([ONE], lambda: False) == 0


def test_a_channel_has_to_be_opened_before_it_is_written_to(tmp_path: Path):
    sink = ChannelSink(StreamingRefChannel(tmp_path), Watermark())
    with pytest.raises(StoreError, match="its writer's side is not taken yet"):
        sink.publish(REFS)
