"""The check after each module: what tests have left is told and ended, and nothing of others."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
from leftovers import MARK, SHARED_MEMORY, LeftoverWatch, is_supported
from processes import ending, lives

from draftworks.distributed.stop_signals import raise_on_stop

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.skipif(not is_supported(), reason="what is asked is in Linux's /proc")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> LeftoverWatch:
    monkeypatch.setenv(MARK, "of the worker that runs this test")
    made = LeftoverWatch(leave_s=0.0)
    made.begin()
    return made


@pytest.fixture
def orphan() -> Iterator[psutil.Process]:
    """A process whose parent has ended."""
    done = subprocess.run(
        ["sh", "-c", "sleep 1000 >&- & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True, check=True
    )
    process = psutil.Process(int(done.stdout))
    yield process
    if lives(process):
        process.kill()


def test_nothing_is_told_where_nothing_is_left(watch: LeftoverWatch):
    subprocess.run(["true"], check=True)
    with socket.create_server(("127.0.0.1", 0)):
        pass
    memory = shared_memory.SharedMemory(create=True, size=10)
    memory.close()
    memory.unlink()
    assert watch.end() == []


def test_a_child_is_told_and_ended(watch: LeftoverWatch):
    with ending(subprocess.Popen(["sleep", "1000"], env={})) as child:
        (told,) = watch.end()
        assert told.endswith(": sleep 1000")
        assert not lives(psutil.Process(child.pid))


def test_an_orphan_is_told_and_ended(watch: LeftoverWatch, orphan: psutil.Process):
    assert psutil.Process() not in orphan.parents()
    assert [f"process {orphan.pid} " in told for told in watch.end()] == [True]
    assert not lives(orphan)


def test_what_was_there_before_is_not_told(watch: LeftoverWatch, orphan: psutil.Process):
    watch.begin()
    assert watch.end() == []
    assert lives(orphan)


def test_a_process_of_another_worker_is_not_told(watch: LeftoverWatch, monkeypatch: pytest.MonkeyPatch, request):
    monkeypatch.setenv(MARK, "another")
    orphan = request.getfixturevalue("orphan")
    assert watch.end() == []
    assert lives(orphan)


def test_what_has_ended_and_was_not_collected_is_not_told(watch: LeftoverWatch):
    with ending(subprocess.Popen(["true"])) as child:
        while lives(psutil.Process(child.pid)):
            time.sleep(0.01)
        assert watch.end() == []


def test_what_ends_a_moment_later_is_not_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MARK, "")
    watch = LeftoverWatch(leave_s=1000.0)
    watch.begin()
    with ending(subprocess.Popen(["sleep", "0.3"])):
        assert watch.end() == []


def test_what_a_fixture_of_the_session_starts_is_left_to_it_with_its_children(watch: LeftoverWatch, tmp_path: Path):
    script = f"read line; sleep 1000 & : > {tmp_path / 'started'}; wait"
    with watch.lasting():
        server = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, text=True)
        listening = socket.create_server(("127.0.0.1", 0))
    with ending(server), listening:
        print(file=server.stdin, flush=True)
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        assert watch.end() == []
        assert len(psutil.Process(server.pid).children()) == 1


def test_an_excused_process_may_come_later(watch: LeftoverWatch):
    with ending(subprocess.Popen(["sleep", "1000"])) as child:
        watch.excuse(lambda: [psutil.Process(child.pid)])
        assert watch.end() == []


def test_the_servers_of_multiprocessing_are_left_and_what_they_fork_is_not(watch: LeftoverWatch):
    context = multiprocessing.get_context("forkserver")
    forked = context.Process(target=time.sleep, args=(1000,))
    forked.start()
    try:
        assert [f"process {forked.pid} " in told for told in watch.end()] == [True]
        forked.join()
    finally:
        forked.kill()


def test_a_port_that_is_listened_on_is_told(watch: LeftoverWatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert watch.end() == [f"port {listening.getsockname()[1]} is still listened on by this process"]


def test_a_port_that_a_library_keeps_is_not_told(watch: LeftoverWatch):
    """As gloo's, whose socket is no object of Python."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept = listening.detach()
        try:
            assert watch.end() == []
        finally:
            os.close(kept)


def test_a_connection_is_not_told(watch: LeftoverWatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch.begin()
        with socket.create_connection(listening.getsockname()), listening.accept()[0]:
            assert watch.end() == []


def test_a_file_of_shared_memory_is_told_and_removed(watch: LeftoverWatch):
    memory = shared_memory.SharedMemory(create=True, size=10)
    try:
        assert watch.end() == [f"file {SHARED_MEMORY / memory.name}"]
        assert not (SHARED_MEMORY / memory.name).exists()
    finally:
        memory.close()
        multiprocessing.resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def test_a_file_of_shared_memory_that_may_be_another_worker_s_is_left(watch: LeftoverWatch):
    file = SHARED_MEMORY / f"draftworks-{uuid.uuid4()}"
    file.write_text("of another")
    try:
        assert watch.end() == []
        assert file.exists()
    finally:
        file.unlink()


USER = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=10)
resource_tracker.unregister(f"/{memory.name}", "shared_memory")
print(memory.name, flush=True)
sys.stdin.read()
memory.unlink()
"""


def test_a_file_of_shared_memory_that_another_process_uses_is_left(
    watch: LeftoverWatch, monkeypatch: pytest.MonkeyPatch
):
    command = [sys.executable, "-c", USER]
    with ending(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) as user:
        watch.excuse(lambda: [psutil.Process(user.pid)])
        assert user.stdout is not None
        name = user.stdout.readline().strip()
        assert watch.end() == []
        assert (SHARED_MEMORY / name).exists()
        user.communicate("")


def test_a_signal_handler_is_told_and_set_back(watch: LeftoverWatch):
    before = signal.getsignal(signal.SIGTERM)
    raise_on_stop()
    assert watch.end() == ["a handler of SIGTERM", "a handler of SIGINT"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_check_costs_next_to_nothing(watch: LeftoverWatch):
    started = time.process_time()
    for _ in range(20):
        watch.begin()
        assert watch.end() == []
    assert (time.process_time() - started) / 20 < 0.05


def test_a_module_that_leaves_a_process_fails_and_the_next_one_does_not(pytester: pytest.Pytester):
    pytester.makepyfile(
        test_first="""
import subprocess
left = []
def test_leaves():
    cat = subprocess.Popen(["cat"], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    left.append(cat)
    cat.stdin.write(b"begun")
    assert cat.stdout.read(5) == b"begun"
""",
        test_next="def test_leaves_nothing(): pass",
    )
    pytester.makeini(f"[pytest]\npythonpath = {ROOT / 'tests' / 'toys'}\nleave_s = 0\n")
    outcome = pytester.runpytest_subprocess("-p", "leftovers_check", "-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=2, errors=1)
    said = re.search(r"test_first.py has left: process (\d+) .*: cat\b", outcome.stdout.str())
    assert said is not None, outcome.stdout.str()
    assert not any(each.pid == int(said[1]) and lives(each) for each in psutil.process_iter())
