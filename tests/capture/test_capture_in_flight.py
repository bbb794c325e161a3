"""Features are the same bytes in the same order, however many batches are in flight; the budget is never exceeded.
Background work returns its result or raises its error, and does not block the exit of the program.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from capture_toys import WatchedEngine, capture_run, random_rows
from waiting import HANG_S, wait_until

from draftworks.capture.background import BackgroundWorker, TransformedFuture, await_result, run_in_background
from draftworks.capture.session import InFlight, InFlightBudget, RequestSize, capture_features
from draftworks.errors import CaptureError, EngineError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.shards import read_header

BATCH_TOKENS = 60


class ConcurrentEngine(WatchedEngine):
    """Answers made up from token ids, several at a time; remembers how many requests and tokens there were at most.

    Attributes:
        gate: requests wait for it once `held` have been made.
        broken: the request with this number, from 0, fails.
    """

    batches_in_flight_limit = None

    def __init__(self, held: int = 10**9) -> None:
        self.rows, self.taps, self.damage, self.loads = [], set(), None, 0
        self.gate = threading.Event()
        self.held = held
        self.broken: dict[int, Exception] = {}
        self.submitted = 0
        self.cancelled = 0
        self.finished = threading.Semaphore(0)

    def submit(self, sequences, taps) -> Future:
        number, self.submitted = self.submitted, self.submitted + 1
        return run_in_background(self._answer, number, sequences, taps)

    def cancel(self, answers) -> None:
        self.cancelled += len(answers)

    def _answer(self, number, sequences, taps):
        if number >= self.held:
            assert self.gate.wait(HANG_S)
        if number in self.broken:
            raise self.broken[number]
        self.finished.release()
        rows = [torch.tensor(row)[:, None].float().expand(-1, 128) + 1 for row in sequences]
        return [{**{tap.name: row * tap.hf_index for tap in taps}, "last": row.clone()} for row in rows]

    def logits(self, sequences):
        return [torch.ones(1, 2000) * sequence[-1] for sequence in sequences]

    def head_logits(self, last):
        return (last[:, :1] - 1) * torch.ones(1, 2000)


def list_shards(root: Path) -> dict[str, list[str]]:
    """The names of the shards, which are digests of their content, with their keys in the order of the file."""
    return {path.name: list(read_header(path).entries) for path in (root / "shards").iterdir()}


def run_of(tiny_target, folder: Path, **capture):
    return capture_run(tiny_target, folder, **{"batch_tokens": BATCH_TOKENS, "backend": "sglang_server", **capture})


@pytest.mark.parametrize("shard_mb", [0, 256], ids=["a shard for each batch", "one shard"])
def test_what_is_stored_does_not_depend_on_how_much_is_in_flight(tiny_target, tmp_path: Path, shard_mb: int):
    rows, stores = random_rows(40), []
    for number, settings in enumerate(({"in_flight_tokens": 1}, {}, {"in_flight_tokens": 10**6, "in_flight_mb": 1})):
        run = run_of(tiny_target, tmp_path / str(number), **settings)
        run = run.model_copy(update={"capture": run.capture.model_copy(update={"shard_mb": shard_mb})})
        assert capture_features(run, ConcurrentEngine(), rows).captured == 40
        stores.append(list_shards(run.store.root))
    assert stores[0] == stores[1] == stores[2]
    assert (len(stores[0]) > 1) == (shard_mb == 0)


def test_the_engine_works_while_features_are_stored(tiny_target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second put waits until the engine has answered two later batches, which taking turns would never give."""
    engine, puts = ConcurrentEngine(), []
    put = LocalFeatureStore.put

    def put_late(self, ref, tensors):
        puts.append(ref.sample_id)
        if len(puts) == 2:
            for _ in range(4):
                assert engine.finished.acquire(timeout=HANG_S)
        return put(self, ref, tensors)

    monkeypatch.setattr(LocalFeatureStore, "put", put_late)
    run = run_of(tiny_target, tmp_path, batch_tokens=1, in_flight_tokens=1000)
    assert capture_features(run, lambda: engine, random_rows(12)).captured == len(puts) == 12
    assert engine.cancelled == 0


def test_the_budget_bounds_tokens_bytes_and_batches():
    size = RequestSize(10, 100)
    for budget, allowed in (
        (InFlightBudget(35, 10**6), 3),
        (InFlightBudget(10**6, 250), 2),
        (InFlightBudget(10**6, 10**6, batches=4), 4),
        (InFlightBudget(1, 1), 1),
    ):
        window: InFlight[int] = InFlight(budget)
        for number in range(20):
            while not window.fits(size):
                window.drop_oldest()
            window.add(number, size)
            assert len(window) <= allowed
        assert (len(window), window.oldest) == (allowed, 20 - allowed)


@pytest.mark.parametrize("error", [EngineError("the first cause"), CaptureError("the first cause")])
def test_the_first_failure_ends_the_run_and_nothing_waits_for_the_others(tiny_target, tmp_path: Path, error):
    engine = ConcurrentEngine(held=3)
    engine.broken = {2: error, 3: EngineError("a later one")}
    run = run_of(tiny_target, tmp_path, batch_tokens=1, in_flight_tokens=1000)
    with pytest.raises(type(error), match="the first cause"):
        capture_features(run, lambda: engine, random_rows(12))
    assert engine.cancelled == engine.submitted - 2
    engine.gate.set()


def test_no_second_batch_is_asked_for_before_the_head_is_verified(tiny_target, tmp_path: Path):
    engine = ConcurrentEngine()
    engine.head_logits = lambda last: torch.zeros(len(last), 2000)
    run = run_of(tiny_target, tmp_path, batch_tokens=1, in_flight_tokens=1000)
    with pytest.raises(CaptureError, match="the target's head on it differs"):
        capture_features(run, lambda: engine, random_rows(12))
    assert engine.submitted == 1


def test_an_engine_computes_in_the_background_as_in_the_thread_that_asks(tiny_engine):
    found: list[tuple[bool, str]] = []

    class Noting(WatchedEngine):
        def capture(self, sequences, taps):
            found.append((torch.is_grad_enabled(), threading.current_thread().name))
            return super().capture(sequences, taps)

    engine, row = Noting(tiny_engine), random_rows(1)[0].input_ids.tolist()
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            streams = engine.submit([row], []).result()[0]
        assert torch.equal(streams["last"], tiny_engine.capture([row], [])[0]["last"])
    assert found == [(True, "background-worker"), (False, "background-worker")]


def test_a_capture_that_is_interrupted_leaves_nothing_running(tiny_target, tiny_engine, tmp_path, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    class Endless(WatchedEngine):
        def capture(self, sequences, taps):
            begun.set()
            try:
                while True:
                    time.sleep(0.001)
            finally:
                ended.set()

    def interrupt(future):
        assert begun.wait(HANG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr("draftworks.capture.verify.await_result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        capture_features(capture_run(tiny_target, tmp_path), Endless(tiny_engine), random_rows(5))
    assert ended.is_set()


def test_its_result_and_its_error_come_back():
    assert run_in_background(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        run_in_background(divmod, 7, 0).result()


def test_a_program_ends_while_it_still_waits():
    waits = "import threading\nfrom draftworks.capture.background import run_in_background\n"
    waits += (
        "begun = threading.Event()\nrun_in_background(lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()"
    )
    assert subprocess.run([sys.executable, "-c", waits], check=False).returncode == 0


def test_a_worker_does_one_thing_after_another_and_begins_again_when_it_was_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftworks.capture.background._IDLE_S", 0.01)
    worker, threads = BackgroundWorker(), set()

    def work(number: int) -> int:
        threads.add(threading.current_thread())
        return number * number

    for _ in range(2):
        futures = [worker.submit(lambda number=number: work(number)) for number in range(20)]
        assert [await_result(each) for each in futures] == [number * number for number in range(20)]
        wait_until(lambda: not any(thread.is_alive() for thread in threads), "the end of an idle thread")
    failed = worker.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await_result(failed)
    assert worker.submit(lambda: "after it").result() == "after it"


def test_what_is_cancelled_is_interrupted_or_never_begun_and_the_rest_is_done():
    worker, begun, ended = BackgroundWorker(), threading.Event(), threading.Event()

    def run_for_ever() -> None:
        begun.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    running, waiting, wanted = (worker.submit(each) for each in (run_for_ever, lambda: None, lambda: "wanted"))
    assert begun.wait(HANG_S)
    worker.cancel([running, waiting])
    assert ended.is_set()
    assert waiting.cancelled()
    with pytest.raises(EngineError, match="was cancelled"):
        running.result()
    assert wanted.result() == "wanted"
    worker.cancel([wanted])
    assert worker.submit(lambda: "again").result() == "again"


def test_cancelling_what_is_done_interrupts_nothing_that_its_thread_does_next():
    worker, gate, done, released = BackgroundWorker(), threading.Event(), threading.Event(), threading.Event()
    followed: list[str] = []

    def follow(future: object) -> None:
        done.set()
        while not released.is_set():
            time.sleep(0.001)
        followed.append("to the end")

    future = worker.submit(lambda: gate.wait())
    future.add_done_callback(follow)
    gate.set()
    assert done.wait()
    worker.cancel([future])
    released.set()
    assert worker.submit(lambda: "next").result() == "next"
    assert followed == ["to the end"]


def test_a_transformed_result_or_error_comes_back():
    assert TransformedFuture(run_in_background(divmod, 7, 2), sum).result() == 4
    with pytest.raises(ZeroDivisionError):
        TransformedFuture(run_in_background(divmod, 7, 0), sum).result()
    with pytest.raises(TypeError):
        TransformedFuture(run_in_background(int), sum).result()
