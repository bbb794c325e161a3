"""Any number of workers share a capture, come and go at any moment, and store the bytes that one stores."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from capture_toys import WatchedEngine, capture_run, random_rows
from coverings import gate_or_long

from draftworks.capture.session import capture_features, capture_missing
from draftworks.config.run_files import CaptureRun, TargetFiles

ROWS = random_rows(150, seed=3, longest=120)
FORK = multiprocessing.get_context("fork")


class SlowEngine(WatchedEngine):
    """Gives other workers time to take their share, and a test time to kill this one."""

    def capture(self, sequences, taps):
        time.sleep(0.02)
        return super().capture(sequences, taps)


def make_run(target: TargetFiles, folder: Path) -> CaptureRun:
    run = capture_run(target, folder, batch_tokens=400, shard_mb=1)
    run.out.mkdir(parents=True)
    return run


def start(run: CaptureRun, engine: WatchedEngine) -> ForkProcess:
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
    workers = [start(run, engine) for _ in range(3)]
    for _ in range(kills):
        time.sleep(chance.random() / 5)
        killed = workers.pop(chance.randrange(3))
        killed.kill()
        workers.append(start(run, engine))
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
