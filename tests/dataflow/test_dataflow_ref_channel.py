"""The channel: order, whole lines, ends, failures, owners, and writers that are killed in the middle of a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from features_toys import toy_ref
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S, StepClock

from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_lines import SlimRefs, WholeRefs
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef

WRITER = """
import sys
from pathlib import Path
from draftworks.dataflow import channel_writer
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.features.contracts import SampleRef

folder, start, stop, cut = Path(sys.argv[1]), *map(int, sys.argv[2:5])

def write_part(handle, content, write=channel_writer._write_whole):
    if cut >= 0:
        write(handle, content[:cut])
        print("cut", flush=True)
        sys.stdin.read()
    write(handle, content)

channel_writer._write_whole = write_part
writer = StreamingRefChannel(folder).open_writer()
print(writer.publish_batch(SampleRef(f"s{n}", "", "", "", {}, {}) for n in range(start, stop)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def channel(tmp_path: Path) -> StreamingRefChannel:
    return StreamingRefChannel(tmp_path / "channel", idle_timeout_s=HANG_S)


def refs_of(*numbers: int) -> list[SampleRef]:
    """References of two stores, so that lines in common change among them."""
    return [
        replace(toy_ref(number), estimated_bytes=100 + number, feature_store_uri=f"mem://{number % 5 > 2}")
        for number in numbers
    ]


def start_writer(channel: StreamingRefChannel, start: int, stop: int, cut: int = -1) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(channel.folder), str(start), str(stop), str(cut)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def ids(refs: list[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


def test_references_arrive_whole_in_order_and_once(channel):
    with channel.open_writer() as writer, channel.open_consumer() as reader:
        assert reader.poll() == []
        assert writer.publish_batch(refs_of(3, 1)) == 2
        assert writer.publish(refs_of(2)[0]) == 1
        assert reader.poll() == refs_of(3, 1, 2)
        assert reader.poll() == []
        assert not reader.has_ended
        writer.close()
        assert reader.poll(wait_s=None) == []
        assert reader.has_ended


def test_the_consumer_may_come_first_and_last(channel):
    with channel.open_consumer() as reader:
        assert reader.poll() == []
        with channel.open_writer() as writer:
            writer.publish_batch(refs_of(1, 2))
        assert reader.poll(limit=1) == refs_of(1)
        assert not reader.has_ended
        assert reader.poll(limit=1) == refs_of(2)
        assert reader.has_ended
    with channel.open_consumer() as reader:
        assert reader.poll() == refs_of(1, 2)
        assert reader.has_ended


def test_in_flight_is_published_less_consumed(channel):
    with channel.open_writer() as writer, channel.open_consumer() as reader:
        writer.publish_batch(refs_of(1, 2, 3))
        reader.mark_consumed(InFlight.of(refs_of(2)))
        assert writer.published == InFlight(3, 306)
        assert writer.consumed_remote == InFlight(1, 102)
        assert writer.in_flight_remote == InFlight(2, 204)
        reader.release()
        with channel.open_consumer():
            assert writer.in_flight_remote == InFlight(3, 306), "a new consumer counts anew"


@given(data=st.data())
@pytest.mark.parametrize("codec", [WholeRefs(), SlimRefs()], ids=lambda codec: codec.name)
def test_nothing_is_lost_or_doubled_wherever_writers_die_and_readers_look(codec, data):
    """Writers die after any byte of a batch; readers poll or come again at any moment."""
    with tempfile.TemporaryDirectory() as folder:
        channel = StreamingRefChannel(Path(folder), codec, HANG_S)
        total = data.draw(st.integers(1, 12))
        refs = refs_of(*range(total))
        writer, reader, read, done = channel.open_writer(), channel.open_consumer(), [], 0
        while done < total:
            batch = refs[done : done + data.draw(st.integers(1, 4))]
            event = data.draw(st.sampled_from(["publish", "die", "poll", "new reader"]))
            if event == "publish":
                writer.publish_batch(batch)
                done += len(batch)
            elif event == "die":
                writer.release()
                encode = codec.make_encoder()
                content = "".join(line + "\n" for ref in batch for line in encode(ref)).encode()
                with (channel.folder / "refs.jsonl").open("ab") as stream:
                    stream.write(content[: data.draw(st.integers(0, len(content)))])
                read += reader.poll()
                writer = channel.open_writer()
                assert writer.publish_batch(refs[: done + len(batch)]) <= len(batch)
                done += len(batch)
            elif event == "poll":
                read += reader.poll(limit=data.draw(st.integers(1, 3)))
            else:
                reader.release()
                reader, read = channel.open_consumer(), []
            assert read == refs[: len(read)]
            assert writer.published == InFlight.of(refs[:done])
        writer.close()
        while not reader.has_ended:
            read += reader.poll(wait_s=None)
        assert read == refs
        reader.close()


@pytest.mark.parametrize("cut", [0, 1, 250, -1])
def test_a_writer_killed_in_the_middle_of_a_line_leaves_a_sound_channel(channel, cut):
    encode = SlimRefs().make_encoder()
    lines = [f"{line}\n" for n in range(3) for line in encode(SampleRef(f"s{n}", "", "", "", {}, {}))]
    cut = cut if cut >= 0 else len("".join(lines)) - 1
    whole = max(0, "".join(lines).encode()[:cut].count(b"\n") - 1)
    first = start_writer(channel, 0, 3, cut)
    assert read_line(first) == "cut\n"
    with channel.open_consumer() as reader:
        assert ids(reader.poll()) == ["s0", "s1", "s2"][:whole]
        kill(first)
        assert reader.poll() == []
        second = start_writer(channel, 0, 5)
        assert read_line(second) == f"{5 - whole}\n"
        assert ids(reader.poll()) == [f"s{number}" for number in range(whole, 5)]
        kill(second)


def test_each_side_has_one_owner_who_is_named(channel):
    other = start_writer(channel, 0, 1)
    assert read_line(other) == "1\n"
    with pytest.raises(StoreError, match=f"has a writer already: process {other.pid} on "):
        channel.open_writer()
    kill(other)
    found = f"has a consumer already: process {os.getpid()} on "
    with channel.open_writer(), channel.open_consumer(), pytest.raises(StoreError, match=found):
        channel.open_consumer()
    with channel.open_consumer():
        pass


def test_a_dead_writer_ends_the_wait_with_one_error_that_names_both_sides(tmp_path):
    channel = StreamingRefChannel(tmp_path / "channel", idle_timeout_s=0.3)
    other = start_writer(channel, 0, 1)
    assert read_line(other) == "1\n"
    kill(other)
    with channel.open_consumer() as reader:
        assert len(reader.poll()) == 1
        found = f"for 0.3 s, after 1 before: writer: process {other.pid} on .*gone; consumer: process {os.getpid()} on .*still"
        with pytest.raises(StoreError, match=found):
            reader.poll(wait_s=None)


def test_a_consumer_without_a_writer_says_so(tmp_path):
    channel = StreamingRefChannel(tmp_path / "channel", idle_timeout_s=0.1)
    with channel.open_consumer() as reader, pytest.raises(StoreError, match="no writer has come; consumer: process"):
        reader.poll(wait_s=None)


def test_idle_time_counts_waiting_only(tmp_path):
    """A trainer that evaluates for long, and then finds nothing new at once, has not waited."""
    clock = StepClock()
    channel = StreamingRefChannel(tmp_path / "channel", idle_timeout_s=0.2, clock=clock)
    with channel.open_consumer() as reader:
        assert reader.poll() == []
        clock.now += 0.3
        assert reader.poll() == []
        for _ in range(3):
            assert reader.poll(wait_s=0.15) == []
            reader.mark_consumed(InFlight(1))
        assert reader.poll(wait_s=0.15) == []
        with pytest.raises(StoreError, match="no reference came"):
            reader.poll(wait_s=0.15)


def test_a_failed_writer_is_told_at_once_and_may_come_again(channel):

    def write_and_fail() -> None:
        with channel.open_writer() as writer:
            writer.publish_batch(refs_of(1))
            raise KeyError("hf9")

    with pytest.raises(KeyError):
        write_and_fail()
    with channel.open_consumer() as reader:
        with pytest.raises(StoreError, match="the writer of reference channel .* failed: KeyError: 'hf9'"):
            reader.poll()
        with channel.open_writer() as writer:
            assert writer.publish_batch(refs_of(1, 2)) == 1
        assert reader.poll() == refs_of(1, 2)
        assert reader.has_ended


def test_a_failure_of_another_session_is_past(channel):
    channel.open_writer().fail("power cut")
    later = replace(channel, session="second start")
    with later.open_consumer() as reader:
        assert reader.poll() == []
    with channel.open_consumer() as reader, pytest.raises(StoreError, match="power cut"):
        reader.poll()


def test_an_ended_stream_takes_nothing_new_and_a_restarted_writer_needs_nothing(channel):
    with channel.open_writer() as writer:
        writer.publish_batch(refs_of(1, 2))
    with channel.open_writer() as writer:
        assert writer.has_ended
        assert writer.publish_batch(refs_of(1, 2)) == 0
        with pytest.raises(StoreError, match="has ended: new references need a new channel"):
            writer.publish_batch(refs_of(3))
    with channel.open_consumer() as reader:
        assert reader.poll() == refs_of(1, 2)
        assert reader.has_ended


def test_the_writer_hears_that_the_consumer_ended_or_failed(channel):
    with channel.open_writer() as writer:
        more, full = InFlight(1), Watermark(samples=1)
        writer.publish_batch(refs_of(1))
        channel.open_consumer().close()
        assert writer.is_consumer_done
        assert not writer.wait_for_room(full, more)
        reader = channel.open_consumer()
        assert not writer.is_consumer_done
        assert not writer.wait_for_room(full, more, should_stop=lambda: True)
        reader.fail("loss is NaN")
        with pytest.raises(StoreError, match=r"the consumer of reference channel .* failed: loss is NaN"):
            writer.wait_for_room(full, more)


def test_a_writer_without_a_consumer_waits_for_the_idle_timeout_only(tmp_path):
    with StreamingRefChannel(tmp_path / "channel", idle_timeout_s=0.2).open_writer() as writer:
        writer.publish_batch(refs_of(1))
        with pytest.raises(StoreError, match="1 samples, 101 bytes in flight.*no consumer has come"):
            writer.wait_for_room(Watermark(samples=1), InFlight(1))


@settings(max_examples=15)
@given(
    limit=st.integers(2, 6),
    bytes_limit=st.one_of(st.none(), st.integers(400, 900)),
    pieces=st.lists(st.integers(1, 2), max_size=8),
    seed=st.integers(0, 99),
)
def test_the_watermark_is_never_exceeded(limit, bytes_limit, pieces, seed):
    with tempfile.TemporaryDirectory() as folder:
        channel = StreamingRefChannel(Path(folder), idle_timeout_s=HANG_S)
        watermark, most = Watermark(limit, bytes_limit), InFlight()
        pending: list[SampleRef] = []

        def consume() -> None:
            with channel.open_consumer() as reader:
                while not reader.has_ended:
                    pending.extend(reader.poll(limit=1 + seed % 3, wait_s=0.01))
                    taken = pending[: 1 + seed % 2]
                    del pending[: len(taken)]
                    reader.mark_consumed(InFlight.of(taken))

        with channel.open_writer() as writer:
            thread = threading.Thread(target=consume, daemon=True)
            thread.start()
            number = 0
            for piece in pieces:
                refs = refs_of(*range(number, number + piece))
                number += piece
                assert writer.wait_for_room(watermark, InFlight.of(refs))
                writer.publish_batch(refs)
                most = max(most, writer.in_flight_remote, key=lambda found: (found.samples, found.bytes))
                assert watermark.has_room(writer.in_flight_remote, InFlight())
        thread.join()


def test_the_control_plane_needs_no_torch():
    script = (
        "import draftworks.dataflow.ref_queues, draftworks.dataflow.ref_channel, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
