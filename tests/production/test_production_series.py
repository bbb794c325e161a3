"""The series of a server: whole whoever writes it and wherever a writer dies, in order, and never too long."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path

import pytest

from draftworks.errors import EngineError, StoreError
from draftworks.production.observer import ServerSeries
from draftworks.production.readings import Reading, split_windows


def make(number: int, instance: str = "one", passes: int | None = None) -> Reading:
    return Reading(float(number), instance, "a", True, None, {"passes": number if passes is None else passes}, None)


def open_series(folder: Path, **options) -> ServerSeries:
    return ServerSeries(folder, "small", "front", **options)


def test_what_was_appended_is_read_in_order(tmp_path: Path):
    series = open_series(tmp_path)
    assert series.read() == []
    for number in range(3):
        assert series.append(lambda before: make(len(before))) == [make(n) for n in range(number + 1)]
    assert open_series(tmp_path).read() == [make(n) for n in range(3)]


def test_several_observers_at_once_see_no_restart_and_lose_no_count(tmp_path: Path):
    """A reading that overtook another one would look like a counter that fell."""
    counter = count()
    seen = threading.Lock()

    def take(before: list[Reading]) -> Reading:
        with seen:
            return make(next(counter))

    def observe() -> None:
        for _ in range(5):
            open_series(tmp_path).append(take)

    observers = [threading.Thread(target=observe) for _ in range(3)]
    for each in observers:
        each.start()
    for each in observers:
        each.join()
    windows = split_windows(open_series(tmp_path).read())
    assert len(windows) == 14
    assert not any(window.restarted for window in windows)
    assert sum(window.passes for window in windows) == 14


def test_a_line_that_was_not_finished_is_not_read_and_does_not_damage_the_next(tmp_path: Path):
    series = open_series(tmp_path)
    series.append(lambda _: make(0))
    series.append(lambda _: make(1))
    whole = series.file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        series.file.write_bytes(whole[:cut])
        assert series.read() == [make(0)]
    series.append(lambda _: make(2))
    assert series.read() == [make(0), make(2)]


def test_an_error_while_the_server_is_read_leaves_the_series_as_it_was(tmp_path: Path):
    series = open_series(tmp_path)
    series.append(lambda _: make(0))
    before = series.file.read_bytes()

    def fail(_: list[Reading]) -> Reading:
        raise EngineError("gone")

    with pytest.raises(EngineError):
        series.append(fail)
    assert series.file.read_bytes() == before
    series.append(lambda _: make(1))  # the lease was given back


def test_a_long_series_is_thinned_and_keeps_its_sums(tmp_path: Path):
    series = open_series(tmp_path, most=16)
    for number in range(60):
        # Two processes, the second from 30 on; its counters begin again.
        one = make(number) if number < 30 else make(number, "two", number - 30)
        series.append(lambda _, one=one: one)
    kept = series.read()
    assert len(kept) <= 16
    assert (kept[0], kept[-1]) == (make(0), make(59, "two", 29))
    assert sum(window.passes for window in split_windows(kept)) == 29 + 29
    assert not list(series.folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema":1,"target":"other","server":"front"}\n', "line 1: expected the header"),
        (b'{"schema":2,"target":"small","server":"front"}\n', "line 1: expected the header"),
        (b'{"schema":1,"target":"small","server":"front"}\n{"time":\n', "line 2"),
        (b'{"schema":1,"target":"small","server":"front"}\n[]\n', "line 2: not a reading"),
        (b"\x00\xff\n", "line 1"),
    ],
)
def test_a_file_of_something_else_is_one_error_and_is_left_alone(tmp_path: Path, content: bytes, message: str):
    series = open_series(tmp_path)
    series.folder.mkdir(parents=True)
    series.file.write_bytes(content)
    with pytest.raises(StoreError, match=message):
        series.append(lambda _: make(0))
    assert series.file.read_bytes() == content


def test_a_clock_that_is_far_behind_is_refused(tmp_path: Path):
    series = open_series(tmp_path)
    series.append(lambda _: make(10_000))
    with pytest.raises(StoreError, match="clock of this machine is 9,000 s behind"):
        series.append(lambda _: make(1_000))
    assert series.read() == [make(10_000)]


@pytest.mark.parametrize("name", ["../a", "", "a/b", "."])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError):
        ServerSeries(tmp_path, "small", name).read()
