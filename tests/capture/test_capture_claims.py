"""Processes that capture into one store at the same time share the work, and lose nothing when one of them dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from capture_toys import WatchedEngine, capture_run, random_rows

from draftworks.capture.claims import Claims, Share, share_out
from draftworks.capture.plan import SampleJob
from draftworks.capture.session import capture_features, write_manifest
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.shards import read_header

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
