"""A lease file tells whether its process lives, on this machine by looking, elsewhere by watching its times."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from draftworks.storage import lease
from draftworks.storage.lease import (
    LONGEST_GAP_S,
    LeaseFile,
    LeaseState,
    LeaseTimes,
    LeaseWatch,
    read_owner,
    sweep_staging,
)
from draftworks.storage.process_place import ProcessPlace

HOLD = """
import sys, time
from pathlib import Path
from draftworks.storage.lease import LeaseFile
assert LeaseFile.create(Path(sys.argv[1])) is not None
print("held", flush=True)
time.sleep(60)
"""


class WatchElsewhere(LeaseWatch):
    """The view of a process on another host, with a clock that a test sets."""

    def __init__(self, times: LeaseTimes) -> None:
        self.now = 1000.0
        super().__init__(times, clock=lambda: self.now)
        self._here = replace(self._here, host="elsewhere", boot="another")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease"


def test_of_two_that_create_a_file_one_holds_it_until_it_releases_it(path: Path):
    held = LeaseFile.create(path)
    assert held is not None
    assert LeaseFile.create(path) is None
    assert LeaseWatch().look(path) is LeaseState.HELD
    assert str(read_owner(path)).startswith(f"process {os.getpid()} on ")
    held.release()
    held.release()
    assert LeaseWatch().look(path) is LeaseState.RELEASED
    assert str(read_owner(path)).startswith(f"process {os.getpid()} on ")
    held.remove()
    assert LeaseWatch().look(path) is LeaseState.MISSING
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("refused", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_has_leases_too(path: Path, monkeypatch: pytest.MonkeyPatch, refused: int):
    def refuse(source: Path, to: Path) -> None:
        raise OSError(refused, "no links")

    monkeypatch.setattr(os, "link", refuse)
    held = LeaseFile.create(path)
    assert held is not None
    assert LeaseFile.create(path) is None
    assert LeaseWatch().look(path) is LeaseState.HELD
    held.remove()
    assert list(path.parent.iterdir()) == []


def test_what_killed_processes_left_is_swept_and_what_is_new_is_not(path: Path):
    for name, age in ((".lease-old", 100), (".lease-new", 0), ("5", 100)):
        (path.parent / name).touch()
        os.utime(path.parent / name, (1000 - age,) * 2)
    sweep_staging(path.parent, 1000, age_s=60)
    assert {each.name for each in path.parent.iterdir()} == {".lease-new", "5"}


def test_a_link_whose_answer_was_lost_counts_as_made(path: Path, monkeypatch: pytest.MonkeyPatch):
    link = os.link

    def link_twice(source: Path, to: Path) -> None:
        link(source, to)
        link(source, to)

    monkeypatch.setattr(os, "link", link_twice)
    held = LeaseFile.create(path)
    assert held is not None
    held.remove()


def test_a_killed_process_holds_nothing_even_before_it_was_waited_for(path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert LeaseWatch().look(path) is LeaseState.HELD
        process.kill()
        while LeaseWatch().look(path) is LeaseState.HELD:
            time.sleep(0.01)
        assert LeaseWatch().look(path) is LeaseState.ENDED
        assert process.returncode is None


def test_a_pid_that_another_process_has_now_is_dead(path: Path, monkeypatch: pytest.MonkeyPatch):
    own = ProcessPlace.own()
    earlier = SimpleNamespace(own=lambda: replace(own, started=own.started - 1))
    monkeypatch.setattr(lease, "ProcessPlace", earlier)
    held = LeaseFile.create(path)
    monkeypatch.undo()
    assert held is not None
    assert LeaseWatch().look(path) is LeaseState.ENDED
    held.remove()


def test_the_thread_renews_the_file_until_it_is_released(path: Path):
    held = LeaseFile.create(path, LeaseTimes(renew_s=0.01))
    assert held is not None
    before = path.stat().st_mtime_ns
    wait_until(lambda: path.stat().st_mtime_ns != before, "that the thread writes")
    held.release()
    after = path.stat().st_mtime_ns
    time.sleep(0.05)
    assert path.stat().st_mtime_ns == after


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_file_that_names_no_process_is_watched_as_one_of_another_host(path: Path, content: str):
    path.write_text(content)
    watch = WatchElsewhere(LeaseTimes(lease_s=3.0))
    assert watch.look(path) is LeaseState.WATCHED
    watch.now += 3
    assert watch.look(path) is LeaseState.EXPIRED


LOOKS = st.lists(st.tuples(st.floats(0, 200), st.sampled_from(["nothing", "past", "future"])), max_size=40)


@given(looks=LOOKS)
def test_elsewhere_a_lease_ends_once_it_was_watched_for_its_time_without_a_change(tmp_path_factory, looks):
    """The times that are set are of any clock; long gaps between two looks, in which the server may have been away, count
    little."""
    path, times = tmp_path_factory.mktemp("lease") / "file", LeaseTimes(lease_s=30.0)
    held = LeaseFile.create(path, times)
    assert held is not None
    watch, watched, stamp = WatchElsewhere(times), 0.0, 0
    assert watch.look(path) is LeaseState.WATCHED
    for gap, renewed in looks:
        watch.now += gap
        watched += min(gap, LONGEST_GAP_S)
        if renewed != "nothing":
            stamp += 1
            os.utime(path, ns=(stamp, stamp if renewed == "past" else 4 * 10**18 + stamp))
            watched = 0.0
        expected = LeaseState.EXPIRED if watched >= times.lease_s else LeaseState.WATCHED
        assert watch.look(path) is expected
    held.remove()
