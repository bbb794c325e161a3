"""A lease has one holder, its numbers only grow, and who lost it publishes nothing."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import wait_for, wait_until

from draftworks.errors import StoreError
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.file_lock import hold_lock, try_lock
from draftworks.storage.lease import Lease, LeaseLostError, LeasePath, LeaseTimes

TIMES = LeaseTimes(renew_s=3600.0, lease_s=0.2)


def take_from_elsewhere(folder: Path) -> Lease:
    """Take a lease as a process of another host does, which its holder does not renew."""
    path = LeasePath(folder, TIMES)
    path._watch._here = replace(path._watch._here, host="elsewhere", boot="another")
    return wait_for(path.try_acquire, "the lease")


def test_numbers_grow_and_one_file_is_left(tmp_path: Path):
    path, numbers = LeasePath(tmp_path / "lock"), []
    for _ in range(5):
        lease = path.try_acquire()
        assert lease is not None
        assert path.try_acquire() is None
        assert LeasePath(tmp_path / "lock").try_acquire() is None
        lease.confirm()
        numbers.append(lease.number)
        lease.release()
        lease.release()
    assert numbers == [1, 2, 3, 4, 5]
    assert [each.name for each in (tmp_path / "lock").iterdir()] == ["5"]
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]


def test_who_lost_a_lease_learns_who_has_it_and_gives_back_nothing_of_the_other(tmp_path: Path):
    mine = LeasePath(tmp_path / "lock", TIMES).try_acquire()
    assert mine is not None
    other = take_from_elsewhere(tmp_path / "lock")
    assert other.number == mine.number + 1
    assert not mine.is_held
    with pytest.raises(LeaseLostError, match=f"lost the lock to process {os.getpid()} on .* is not published"):
        mine.confirm()
    mine.release()
    other.confirm()
    assert LeasePath(tmp_path / "lock").try_acquire() is None
    other.release()
    assert LeasePath(tmp_path / "lock").try_acquire() is not None


def test_a_number_that_was_removed_is_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process looks, sleeps while two others hold the lease after one another, and then creates the next number."""
    from draftworks.storage import lease as module

    path, slow = LeasePath(tmp_path / "lock"), LeasePath(tmp_path / "lock")
    first = path.try_acquire()
    assert first is not None
    first.release()
    held: list[Lease] = []
    make = module.LeaseFile.create

    def create_late(*args):
        monkeypatch.setattr(module.LeaseFile, "create", make)
        for _ in range(2):
            for each in held:
                each.release()
            lease = path.try_acquire()
            assert lease is not None
            held.append(lease)
        return make(*args)

    monkeypatch.setattr(module.LeaseFile, "create", create_late)
    assert slow.try_acquire() is None
    held[-1].confirm()
    assert [each.name for each in (tmp_path / "lock").iterdir()] == ["3"]


def test_what_was_built_under_a_lost_lease_is_not_published(tmp_path: Path):
    store, others = ArtifactStore(tmp_path), []

    def build(out: Path) -> BuildResult:
        (out / "data.txt").write_text("x")
        with try_lock(tmp_path / "thing" / "tiny" / ".lock") as held:
            assert held is None
        others.append(LeasePath(tmp_path / "thing" / "tiny" / ".lock"))
        (lease,) = (tmp_path / "thing" / "tiny" / ".lock").iterdir()
        lease.write_text("{}")  # names no process: it is only watched
        others.append(take_from_elsewhere(tmp_path / "thing" / "tiny" / ".lock"))
        return BuildResult("x")

    with pytest.raises(StoreError, match="lost the lock"):
        store.obtain("thing", "tiny", {"a": 1}, build)
    assert store.find("thing", "tiny") is None
    assert [each.name for each in (tmp_path / "thing" / "tiny").glob("*.partial")]


def test_a_lock_file_of_an_earlier_version_is_replaced_once_it_is_free(tmp_path: Path):
    lock = tmp_path / ".lock"
    with lock.open("w") as old:
        fcntl.flock(old, fcntl.LOCK_EX)
        assert LeasePath(lock).try_acquire() is None
    with try_lock(lock) as lease:
        assert lease is not None
        assert lease.number == 1
    assert lock.is_dir()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        LeasePath(tmp_path / "missing" / "lock").try_acquire()


def test_many_threads_hold_it_one_at_a_time(tmp_path: Path):
    inside, numbers, errors = [], [], []

    def work() -> None:
        for _ in range(10):
            with hold_lock(tmp_path / "lock", "busy") as lease:
                inside.append(1)
                if len(inside) != 1:
                    errors.append("two at a time")
                numbers.append(lease.number)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 60


COUNT = """
import sys
from pathlib import Path
from draftworks.storage.file_lock import hold_lock

folder, log = Path(sys.argv[1]), Path(sys.argv[2]).open("a")
print("started", flush=True)
while True:
    with hold_lock(folder / "lock", "busy") as lease:
        log.write(f"{lease.number} in\\n"); log.flush()
        count = int((folder / "count").read_text() or 0)
        lease.confirm()
        (folder / "next").write_text(str(count + 1))
        (folder / "next").rename(folder / "count")
        log.write(f"{lease.number} out\\n"); log.flush()
"""


def test_processes_killed_at_random_moments_lose_no_count_and_block_nobody(tmp_path: Path):
    (tmp_path / "count").write_text("0")
    log, chance = tmp_path / "log", random.Random(0)
    command = [sys.executable, "-c", COUNT, tmp_path, log]

    def start() -> subprocess.Popen:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "started\n"
        return process

    def count() -> int:
        return len(log.read_text().splitlines())

    workers = [start() for _ in range(3)]
    try:
        for _ in range(8):
            before = count()
            wait_until(lambda before=before: count() >= before + 20, "the lock")
            time.sleep(chance.random() / 50)
            killed = workers.pop(0)
            killed.send_signal(signal.SIGKILL)
            workers.append(start())
            killed.wait()
            killed.stdout.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
    lines = [line.split() for line in log.read_text().splitlines()]
    entered = [int(number) for number, what in lines if what == "in"]
    assert entered == sorted(set(entered)), "numbers grow"
    left, previous = 0, None
    for number, what in lines:  # a holder leaves before another enters, unless it was killed inside
        if what == "out":
            assert previous == (number, "in")
            left += 1
        previous = (number, what)
    assert left <= int((tmp_path / "count").read_text()) <= left + 1 + len(entered) - left


class LeaseMachine(RuleBasedStateMachine):
    """Processes of several hosts that take, renew, release, and are silent for a while; time passes by the watchers' clocks."""

    HOSTS = 3

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name) / "lock"
        self.now = 0.0
        times = LeaseTimes(renew_s=3600.0, lease_s=0.1)
        self.paths = [LeasePath(self.folder, times) for _ in range(self.HOSTS)]
        for host, path in enumerate(self.paths):
            path._watch._here = replace(path._watch._here, host=f"host {host}", boot=str(host))
            path._watch._clock = lambda: self.now
        self.held: dict[int, Lease] = {}
        self.numbers: list[int] = []

    @rule(host=st.integers(0, HOSTS - 1))
    def take(self, host: int) -> None:
        if host in self.held:
            return
        lease = self.paths[host].try_acquire()
        if lease is not None:
            self.held[host] = lease
            self.numbers.append(lease.number)

    @rule(host=st.integers(0, HOSTS - 1))
    def renew(self, host: int) -> None:
        if host in self.held:
            self.held[host]._file.renew()

    @rule(host=st.integers(0, HOSTS - 1))
    def release(self, host: int) -> None:
        if host in self.held:
            self.held.pop(host).release()

    @rule(seconds=st.sampled_from([0.03, 0.07, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def numbers_grow_and_one_is_confirmed(self) -> None:
        assert self.numbers == sorted(set(self.numbers))
        confirmed = [lease.number for lease in self.held.values() if lease.is_held]
        assert len(confirmed) <= 1
        if confirmed:
            assert confirmed == [max(self.numbers)]

    def teardown(self) -> None:
        for lease in self.held.values():
            lease.release()
        self._temporary.cleanup()


TestLeases = LeaseMachine.TestCase
