"""With several processes on one cache, some of them killed, an entry is always complete or absent."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import eval_cache_producer
import pytest
from eval_cache_producer import CONFIG, GO, LOG, generation_in, inputs_of, writer
from kill_points import killed_before

from draftworks.evaluation.eval_cache import EvalCache

KILLS = 6
LAST = 10**6


def started(cache_dir: Path, mode: str) -> subprocess.Popen[str]:
    """Start a process and wait until it has imported everything."""
    command = [sys.executable, eval_cache_producer.__file__, str(cache_dir), mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def churning(cache_dir: Path) -> Iterator[None]:
    """Context in which another process replaces and invalidates the entry again and again; it is killed at the end."""
    process = started(cache_dir, "churn")
    try:
        yield
        assert process.poll() is None, "it should have gone on until it was killed"
    finally:
        process.kill()
        process.communicate()


def assert_whole_or_absent(cache: EvalCache) -> None:
    path = cache.try_get(CONFIG, verify=True)
    assert path is None or generation_in(path) >= 0


def assert_goes_on(cache: EvalCache, generation: int) -> None:
    """The next call succeeds and leaves nothing but the entry."""
    entry = cache.get_or_produce(CONFIG, writer(generation), inputs_of(generation))
    assert generation_in(entry.path) == generation
    assert {path.name for path in cache.root.iterdir()} == {CONFIG.cache_key, f"{CONFIG.cache_key}.lock"}


def test_two_processes_at_once_produce_once(tmp_path: Path):
    processes = [started(tmp_path, "once") for _ in range(2)]
    (tmp_path / GO).touch()
    found = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(entry.pop("hit") for entry in found) == [False, True]
    assert found[0] == found[1]
    assert len((tmp_path / LOG).read_text().splitlines()) == 1


def test_a_killed_producer_leaves_no_entry_or_a_whole_one(tmp_path: Path):
    cache, moments = EvalCache(tmp_path), random.Random(5)
    for kill in range(KILLS):
        with churning(tmp_path):
            time.sleep(moments.uniform(0.0, 0.2))
        assert_whole_or_absent(cache)
        assert_goes_on(cache, LAST + kill)


def production(cache: EvalCache) -> None:
    cache.get_or_produce(CONFIG, writer(2), inputs_of(2))


def invalidation(cache: EvalCache) -> None:
    cache.invalidate(CONFIG)


@pytest.mark.parametrize(
    ("work", "replaces"), [(production, False), (production, True), (invalidation, True)], ids=["new", "again", "gone"]
)
def test_a_kill_before_any_change_of_the_file_system_leaves_no_entry_or_a_whole_one(
    tmp_path: Path, work: Callable[[EvalCache], None], replaces: bool
):
    for event in count():
        cache = EvalCache(tmp_path / str(event))
        if replaces:
            cache.get_or_produce(CONFIG, writer(1), inputs_of(1))
        killed = killed_before(event, partial(work, cache))
        assert_whole_or_absent(cache)
        assert_goes_on(cache, 3)
        if not killed:
            break
    assert event >= 5


def test_a_reader_sees_one_whole_entry_or_none_while_it_is_replaced_and_invalidated(tmp_path: Path):
    cache, seen = EvalCache(tmp_path), set()
    with churning(tmp_path):
        while len(seen) < 40:
            if cache.try_get(CONFIG, verify=True) is not None:
                with suppress(OSError):  # replaced or invalidated since it was found
                    seen.add(cache.dir_for(CONFIG).stat().st_mtime_ns)
