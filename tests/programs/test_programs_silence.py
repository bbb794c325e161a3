"""A program that has nothing to say for a while says what it is doing, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from draftworks.programs.heartbeat import Heartbeat
from draftworks.programs.program import ProgramContext
from draftworks.programs.silence import SILENCE_S, Silence


@dataclass
class Time:
    """A clock that tests move, and the processor time of the program."""

    now: float = 100.0
    cpu: float = 7.0
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.silence = Silence(self.lines.append, lambda: self.now, lambda: self.cpu)

    def let_pass(self, seconds: float, cpu: float) -> list[str]:
        """Look once a second, as the thread does, and return the lines of that time."""
        before = len(self.lines)
        for _ in range(round(seconds)):
            self.now, self.cpu = self.now + 1, self.cpu + cpu / seconds
            self.silence.break_it()
        return self.lines[before:]


def test_no_silence_is_longer_than_it_may_be():
    time = Time()
    with time.silence.doing("loading the target"):
        assert time.let_pass(SILENCE_S - 1, cpu=10) == []
        assert time.let_pass(1 + 2 * SILENCE_S, cpu=30) == [
            f"loading the target: {count * SILENCE_S:.0f} s so far, at work" for count in (1, 2, 3)
        ]


def test_a_line_of_the_program_begins_another_silence():
    time = Time()
    for _ in range(5):
        assert time.let_pass(SILENCE_S - 1, cpu=10) == []
        time.silence.heard()


def test_a_program_that_does_nothing_is_not_said_to_be_at_work():
    time = Time()
    assert time.let_pass(SILENCE_S, cpu=0) == ["nothing to report: 15 s so far, waiting"]
    assert time.let_pass(SILENCE_S, cpu=1) == ["nothing to report: 30 s so far, at work"]


def test_what_is_done_within_is_named_until_its_end():
    time = Time()
    with time.silence.doing("measuring"):
        with time.silence.doing("loading"):
            assert time.let_pass(SILENCE_S, cpu=9)[0].startswith("loading: 15 s")
        assert time.let_pass(SILENCE_S, cpu=9)[0].startswith("measuring: 30 s")
    with pytest.raises(RuntimeError), time.silence.doing("failing"):
        raise RuntimeError
    assert time.let_pass(SILENCE_S, cpu=9)[0].startswith("nothing to report")


def test_a_broken_silence_is_no_sign_of_progress(tmp_path, monkeypatch, capsys):
    """A rank that waits for another for ever must still be found by its launcher."""
    beats = []
    monkeypatch.setattr(Heartbeat, "beat", lambda self, message=None: beats.append(message))
    context = ProgramContext(heartbeat=object.__new__(Heartbeat))
    context.print_line("nothing to report: 15 s so far, waiting")
    assert beats == []
    context.log("step 3")
    assert beats == ["step 3"]
    assert capsys.readouterr().out.splitlines() == ["nothing to report: 15 s so far, waiting", "step 3"]
