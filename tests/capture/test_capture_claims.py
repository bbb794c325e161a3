"""Processes that capture into one store at the same time share the work, and lose nothing when one of them dies.
Ranges of a plan are each finished once, by processes that come and are killed at any moment.
Any number of workers share a capture, come and go at any moment, and store the bytes that one stores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
from capture_toys import WatchedEngine, capture_run, random_rows
from coverings import gate_or_long

from draftworks.capture.answers.answer_sets import RangeQueue
from draftworks.capture.capture_plan import SampleJob
from draftworks.capture.claims import Claims, Share, share_out
from draftworks.capture.session import capture_features, capture_missing, write_manifest
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.shards import read_header
from draftworks.storage.lease import LeaseLostError, LeaseTimes

HELD = "import sys, time; from pathlib import Path; from draftworks.capture.claims import Claims\n"
HELD += "with Claims(Path(sys.argv[1])).take({'a'}):\n    print('held', flush=True)\n    time.sleep(60)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def job(name: str, *streams: str) -> SampleJob:
    streams = streams or ("last",)
    return SampleJob(0, name, 1, {stream: f"{name}-{stream}" for stream in streams}, streams)


class CapturingProcess:
    """One capturing process: `step` stores its next batches; names are `sample-stream`."""

    def __init__(self, root: Path, *windows: list[SampleJob]) -> None:
        self._store = LocalFeatureStore(root)
        self._shared = share_out([[window] for window in windows], self._store, Claims(root))
        self._share = Share()

    def step(self) -> list[str]:
        """Names of the streams that it captures now; they are stored when it asks for the next window."""
        self._share.finish()
        while not (share := next(self._shared, None)) or not share.batches:
            if share is None:
                self._share = Share()
                return []
        self._share = share
        return [each.keys[name] for batch in share.batches for each in batch for name in self._put(each)]

    def finish(self) -> list[str]:
        return [key for keys in iter(self.step, []) for key in keys]

    def _put(self, each: SampleJob) -> tuple[str, ...]:
        keys = {name: each.keys[name] for name in each.missing}
        self._store.put(SampleRef(each.sample_id, "", "", "", keys, {}), dict.fromkeys(keys, torch.zeros(1)))
        return each.missing


def finish_all(*processes: CapturingProcess) -> list[list[str]]:
    """Return what each process still captures when all of them run to their end."""
    with ThreadPoolExecutor(len(processes)) as threads:
        return [each.result() for each in [threads.submit(process.finish) for process in processes]]


def test_what_nobody_else_has_is_claimed_and_given_back(root: Path):
    claims = Claims(root)
    with claims.take({"a", "b"}) as first:
        assert (first.own, first.busy) == ({"a", "b"}, None)
        with claims.take({"b", "c"}) as second:
            assert second.own == {"c"}
            assert second.busy is not None
    with claims.take({"a", "b", "c"}) as third:
        assert third.own == {"a", "b", "c"}
    assert [path.name for path in (root / "claims").iterdir()] == ["all.lock"]


def test_the_claim_of_a_killed_process_is_nobodys(root: Path):
    with subprocess.Popen([sys.executable, "-c", HELD, root], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with Claims(root).take({"a", "b"}) as taken:
            assert taken.own == {"b"}
        process.kill()
    with Claims(root).take({"a", "b"}) as taken:
        assert taken.own == {"a", "b"}
    assert [path.name for path in (root / "claims").iterdir()] == ["all.lock"]


def test_two_share_the_windows_and_each_feature_is_captured_once(root: Path):
    windows = [[job("a"), job("b")], [job("c")], [job("d")]]
    one, other = CapturingProcess(root, *windows), CapturingProcess(root, *windows)
    assert one.step() == ["a-last", "b-last"]
    assert other.step() == ["c-last"]
    assert one.step() == ["d-last"]
    assert finish_all(one, other) == [[], []]


def test_streams_of_one_sample_may_be_captured_by_two(root: Path):
    one, other = CapturingProcess(root, [job("a", "hf2", "last")]), CapturingProcess(root, [job("a", "hf4", "last")])
    assert one.step() == ["a-hf2", "a-last"]
    assert other.step() == ["a-hf4"]
    assert finish_all(one, other) == [[], []]


def test_what_another_leaves_undone_is_captured_after_it(root: Path):
    one, other = CapturingProcess(root, [job("a")]), CapturingProcess(root, [job("a"), job("b")])
    shared = one._shared
    next(shared)  # claimed, and never stored
    assert other.step() == ["b-last"]
    waiting = threading.Timer(0.2, shared.close)
    waiting.start()
    assert other.step() == ["a-last"]
    waiting.join()


def test_where_nothing_can_be_claimed_everything_is_captured(root: Path, caplog):
    (root / "claims").write_text("no folder")
    assert CapturingProcess(root, [job("a")]).step() == ["a-last"]
    assert "claims are not possible" in caplog.text


class OneAtATime(WatchedEngine):
    """Wrapper that lets threads share an engine."""

    lock = threading.Lock()

    def capture(self, sequences, taps):
        with self.lock:
            return super().capture(sequences, taps)

    def logits(self, sequences):
        with self.lock:
            return super().logits(sequences)


def count_tensors(root: Path) -> Counter[str]:
    return Counter(key for path in (root / "shards").iterdir() for key in read_header(path).entries)


def test_two_targets_of_the_same_weights_capture_a_sample_once(tiny_target, tmp_path: Path, watched: WatchedEngine):
    """Processes run at their own speed, in windows of one batch, over overlapping sets."""
    rows, engines, errors = random_rows(40), [OneAtATime(watched), OneAtATime(watched)], []
    shared = capture_run(tiny_target, tmp_path).store
    runs = []
    for name in ("a", "copy"):
        run = capture_run(tiny_target.model_copy(update={"name": name}), tmp_path / name, batch_tokens=60)
        capture = run.capture.model_copy(update={"shard_mb": 0})  # a window of its own for each batch
        runs.append(run.model_copy(update={"store": shared, "capture": capture}))
    sets = [rows[:30], rows[10:]]

    def work(number: int) -> None:
        try:
            capture_features(runs[number], engines[number], sets[number])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(count_tensors(runs[0].store.root).values()) == {1}
    for run, tokens in zip(runs, sets, strict=True):
        assert write_manifest(run, tokens).samples == 30


@pytest.fixture
def workers(tiny_target, tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    run = capture_run(tiny_target, tmp_path, batch_tokens=60, shard_mb=1)
    path = run.save(tmp_path / "run.yaml")
    worker = Path(__file__).parents[1] / "toys" / "capture_worker.py"
    command = [sys.executable, worker, path, "150"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_one_of_two_writers_is_killed_and_the_other_completes_the_set(workers, tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path, batch_tokens=60), random_rows(150, seed=1, longest=40)
    doomed, other = workers
    for _ in range(8):
        doomed.stdout.readline()
    doomed.kill()
    other.communicate()
    assert other.returncode == 0
    assert LocalFeatureStore(run.store.root).verify().ok
    assert capture_features(run, watched, tokens).captured == 0
    assert set(count_tensors(run.store.root).values()) == {1}


FORK = multiprocessing.get_context("fork")
COUNT = 60


def work(folder: Path) -> None:
    for taken in RangeQueue(folder, COUNT).take():
        time.sleep(0.01)
        with (folder / "log").open("a") as log:
            log.write(f"{taken.number} {os.getpid()}\n")
        taken.finish({"number": taken.number})


def start(folder: Path) -> ForkProcess:
    process = FORK.Process(target=work, args=(folder,))
    process.start()
    return process


@pytest.mark.parametrize("kills", [0, 10])
def test_all_ranges_are_finished_and_only_killed_ones_are_worked_on_twice(tmp_path: Path, kills: int):
    chance, workers = random.Random(1), [start(tmp_path) for _ in range(3)]
    for _ in range(kills):
        time.sleep(chance.random() / 20)
        killed = workers.pop(chance.randrange(3))
        killed.kill()
        workers.append(start(tmp_path))
        killed.join()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert RangeQueue(tmp_path, COUNT).read_results() == [{"number": number} for number in range(COUNT)]
    worked = [int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()]
    assert set(worked) == set(range(COUNT))
    assert len(worked) <= COUNT + kills


def test_a_range_that_is_left_unfinished_is_taken_again(tmp_path: Path):
    numbers = []
    for taken in RangeQueue(tmp_path, 2).take():
        numbers.append(taken.number)
        if len(numbers) > 2:
            taken.finish(None)
    assert sorted(numbers) == [0, 0, 1, 1]
    with pytest.raises(FileNotFoundError):
        RangeQueue(tmp_path, 3).read_results()


def test_who_lost_a_range_publishes_nothing_and_the_folder_may_go(tmp_path: Path):
    times = LeaseTimes(renew_s=3600, lease_s=0.2)
    (tmp_path / "plan").mkdir()
    slow, waited = RangeQueue(tmp_path / "plan", 1, times).take(), []
    lost = next(slow)
    lease = tmp_path / "plan" / "0.lock" / "1"
    owner = json.loads(lease.read_text())
    lease.write_text(json.dumps({**owner, "place": {**owner["place"], "host": "elsewhere"}}))
    (again,) = list(_take_all(RangeQueue(tmp_path / "plan", 1, times), waited))
    assert again == "finished"
    assert waited
    with pytest.raises(LeaseLostError):
        lost.finish("late")
    assert RangeQueue(tmp_path / "plan", 1).read_results() == ["finished"]
    (tmp_path / "plan").rename(tmp_path / "old")
    assert list(slow) == []


def _take_all(queue: RangeQueue, waited: list[int]):
    for taken in queue.take(lambda: waited.append(1)):
        assert replace(taken).lease.number == 2
        taken.finish("finished")
        yield "finished"


ROWS = random_rows(150, seed=3, longest=120)


class SlowEngine(WatchedEngine):
    """Gives other workers time to take their share, and a test time to kill this one."""

    def capture(self, sequences, taps):
        time.sleep(0.02)
        return super().capture(sequences, taps)


def make_run(target: TargetFiles, folder: Path) -> CaptureRun:
    run = capture_run(target, folder, batch_tokens=400, shard_mb=1)
    run.out.mkdir(parents=True)
    return run


def start_capture(run: CaptureRun, engine: WatchedEngine) -> ForkProcess:
    process = FORK.Process(target=capture_missing, args=(run, SlowEngine(engine), ROWS))
    process.start()
    return process


def read_all(run: CaptureRun) -> dict[str, object]:
    """Return every file of the store and of the feature set, whatever the folder; fields of headers have no order."""
    stored: dict[str, object] = {}
    for path in (run.store.root / "shards").iterdir():
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        stored[path.name] = (json.loads(content[8:end]), content[end:])
    manifest = json.loads((run.out / "manifest.json").read_text().replace(str(run.store.root), "STORE"))
    del manifest["refs_digest"]  # the references name the folder
    refs = (run.out / "refs.jsonl").read_text().replace(str(run.store.root), "STORE")
    return stored | {"manifest": manifest, "refs": refs}


@pytest.fixture(scope="module")
def alone(tiny_target: TargetFiles, tiny_engine, tmp_path_factory) -> dict[str, object]:
    run = make_run(tiny_target, tmp_path_factory.mktemp("alone"))
    capture_features(run, WatchedEngine(tiny_engine), ROWS)
    assert len(list((run.store.root / "shards").iterdir())) > 5
    return read_all(run)


# Where nobody is killed nothing is done that is not done between two kills.
@pytest.mark.parametrize("kills", gate_or_long([0, 3, 8], [3]))
def test_workers_that_come_and_are_killed_store_what_one_stores(
    tiny_target: TargetFiles, tiny_engine, tmp_path: Path, alone: dict[str, object], kills: int
):
    run, chance = make_run(tiny_target, tmp_path), random.Random(kills)
    engine = WatchedEngine(tiny_engine)
    workers = [start_capture(run, engine) for _ in range(3)]
    for _ in range(kills):
        time.sleep(chance.random() / 5)
        killed = workers.pop(chance.randrange(3))
        killed.kill()
        workers.append(start_capture(run, engine))
        killed.join()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    summary = capture_features(run, engine, ROWS)
    assert summary.captured == 0
    found = read_all(run)
    assert found.keys() == alone.keys()
    assert found == alone
    assert list((run.store.root / "claims").iterdir()) == [run.store.root / "claims" / "all.lock"]
