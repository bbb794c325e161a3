"""Parts are written behind the engine's back: copied at once, within bounds, none without its part or its reason."""

from __future__ import annotations

import threading

import torch
from waiting import HANG_S

from draftworks.errors import StoreError
from draftworks.handover.background import BackgroundHandOver
from draftworks.handover.spool import Part, PartSink


class SlowSink(PartSink):
    """Writes nothing before `gate` is set; fails for requests whose id ends with "bad"."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.announced: list[str] = []
        self.written: dict[str, Part] = {}
        self.failed: dict[str, str] = {}

    def announce(self, request_id: str, start: int) -> None:
        self.announced.append(request_id)

    def write(self, request_id: str, part: Part) -> None:
        assert self.gate.wait(HANG_S)
        if request_id.endswith("bad"):
            raise StoreError("the sink is broken")
        if request_id.endswith("bug"):
            raise ZeroDivisionError
        self.written[request_id] = part

    def fail(self, request_id: str, reason: str) -> None:
        self.failed[request_id] = reason


def make_part(value: float, positions: int = 4) -> Part:
    return Part(0, torch.arange(positions), torch.full((2, positions, 8), value), torch.full((positions, 8), value))


def test_the_engine_goes_on_and_may_use_its_memory_again():
    sink = SlowSink()
    hand_over, part = BackgroundHandOver(sink), make_part(1.0)
    for number in range(5):
        part.taps.fill_(number)
        part.last.fill_(number)
        hand_over.put(f"{number}", part)
    assert sink.announced == ["0", "1", "2", "3", "4"]
    assert not sink.written
    sink.gate.set()
    hand_over.flush()
    assert {int(name): written.last[0, 0].item() for name, written in sink.written.items()} == {n: n for n in range(5)}
    assert all(written.taps.is_contiguous() for written in sink.written.values())


def test_a_full_queue_blocks_and_loses_nothing():
    sink, part = SlowSink(), make_part(1.0)
    hand_over = BackgroundHandOver(sink, queue_bytes=int(2.5 * part.nbytes))
    engine = threading.Thread(target=lambda: [hand_over.put(f"{number}", part) for number in range(20)], daemon=True)
    engine.start()
    engine.join(0.3)
    assert engine.is_alive()
    assert len(sink.announced) == 2
    sink.gate.set()
    engine.join(HANG_S)
    hand_over.flush()
    assert list(sink.written) == [f"{number}" for number in range(20)]


def test_a_part_larger_than_the_queue_goes_through_alone():
    sink, part = SlowSink(), make_part(1.0)
    sink.gate.set()
    hand_over = BackgroundHandOver(sink, queue_bytes=1)
    for number in range(3):
        hand_over.put(f"{number}", part)
    hand_over.flush()
    assert len(sink.written) == 3


def test_what_fails_has_its_reason_and_the_others_are_written():
    sink = SlowSink()
    sink.gate.set()
    hand_over = BackgroundHandOver(sink)
    for name in ("a", "b-bad", "c-bug", "d"):
        hand_over.put(name, make_part(1.0))
    hand_over.flush()
    assert list(sink.written) == ["a", "d"]
    assert sink.failed["b-bad"] == "StoreError: the sink is broken"
    assert "ZeroDivisionError" in sink.failed["c-bug"]
    assert "Traceback" in sink.failed["c-bug"]
