"""All processes of a stream in arrival order, with a toy in the trainer's place, and what they came to.

The toy's state is a chain of digests of what every step read, saved every few steps as a checkpoint is. So two "weights"
are equal if and only if the same tensors came in the same order. All else is the real thing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bag_engine import BagEngine
from ports import reserve_port
from torch import Tensor
from waiting import HANG_S, wait_until

from draftworks.capture.engine import load_engine
from draftworks.config.capture import CaptureSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.features.contracts import TrainBatch
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.storage.identity import LayerTap
from draftworks.stream.arrival_producer import ProducerParts, drive_producer
from draftworks.stream.arrival_stream import ArrivalStream
from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.controller import ControlPlane, resolve_control_plane
from draftworks.stream.leases import LeaseKeeper
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.row_sources import TokenSource

SAMPLES, BATCH, SAVE, WATERMARK = 64, 4, 3, 24
STEPS = SAMPLES // BATCH
STREAMS = ("hf2", "last")
SECRET = b"a secret of the tests only, long enough"
STOPPED = 143
_CONTEXT = multiprocessing.get_context("forkserver")


def make_rows() -> list[TokenRow]:
    """Samples of 10 to 29 tokens; three contents are in four samples each, near and far."""
    rng = np.random.default_rng(7)
    ids = [rng.integers(5, 900, int(rng.integers(10, 30))).astype(np.int32) for _ in range(SAMPLES)]
    for first in (2, 11, 20):
        for again in (first + 1, first + 15, first + 40):
            ids[again] = ids[first]
    return [TokenRow(f"s{i:04d}", row, np.arange(len(row)) >= 3) for i, row in enumerate(ids)]


ROWS = make_rows()


@dataclass(frozen=True)
class ArrivalSite:
    """Where a stream is, and how its processes behave.

    Attributes:
        control: the address of a control server; None: all open the database.
        engine: options of `BagEngine`.
        stop_at_put: a file; the first producer that is to store something writes it and stands still until there is a .go.
    """

    folder: Path
    target: TargetFiles
    control: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_failed_share: float = 0.01
    lease_s: float = 40.0
    hold_s: float = 3.0
    pace_s: float = 0.0
    idle_timeout_s: float = HANG_S
    graceful: bool = True
    stop_at_put: Path | None = None

    @property
    def database(self) -> Path:
        return self.folder / "control.sqlite"

    def open_plane(self, **options: Any) -> ControlPlane:
        if self.control is None:
            return resolve_control_plane("disaggregated", "draft", self.database, **options)
        return resolve_control_plane(
            "disaggregated", "draft", store=RemoteMetadataStore(self.control, SECRET, HANG_S), **options
        )

    def open_store(self) -> KeyedSharedDirStore:
        return KeyedSharedDirStore(self.folder / "store")

    def make_parts(self, **changes: Any) -> ProducerParts:
        options = {"entry_point": "bag_engine:load", "engine": "bag", "options": dict(self.engine)}
        spec = CaptureSpec(
            backend="custom",
            device="cpu",
            compute_dtype="float32",
            dtype="float32",
            custom=options,
            max_failed_share=self.max_failed_share,
        )
        out = self.folder / "unused"
        store = StoreSpec(root=out)
        run = CaptureRun(out=out, target=self.target, tokens=out, taps=[2], capture=spec, store=store)
        made: dict[str, Any] = {
            "source": TokenSource(ROWS, 100),
            "capture": run,
            "streams": STREAMS,
            "load_engine": lambda: load_engine(self.target, spec, torch.device("cpu")),
            **changes,
        }
        return ProducerParts(**made)


class ToyStrategy:
    name, feature_names = "toy", STREAMS

    def collate(self, samples, sample_ids) -> TrainBatch:
        return TrainBatch({"digests": [digest_sample(each) for each in samples]}, tuple(sample_ids))  # type: ignore[dict-item]

    pack = collate


def digest_sample(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def produce(site: ArrivalSite, number: int) -> None:
    if site.stop_at_put is not None:
        _stop_at_put(site.stop_at_put)
    controller = site.open_plane(lease_s=site.lease_s).controller
    producer = site.make_parts().make_producer(
        controller, site.open_store(), Watermark(samples=WATERMARK), BATCH, f"p{number}", site.idle_timeout_s
    )
    stop: list[int] = []
    if site.graceful:
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    print(drive_producer(producer, lambda: bool(stop)), flush=True)


def train(site: ArrivalSite, rank: int, world: int, rendezvous: Path) -> None:
    if world > 1:
        store = f"file://{rendezvous}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG_S)
        )
    stop: list[int] = []
    if site.graceful:
        signal.signal(signal.SIGTERM, lambda *_: stop.append(signal.SIGTERM))
    step, chain = read_chain(site.folder, rank, world)
    plane = site.open_plane(consumer_lease_s=site.hold_s)
    spec = TrainingSpec(global_batch_size=BATCH, micro_batch_size=2, max_steps=STEPS, compute_dtype="float32")
    stream = ArrivalStream(
        *(site.open_store(), ToyStrategy(), spec, plane, step, "checkpoint"),  # type: ignore[arg-type]
        lambda: stop[0] if stop else 0,
        site.idle_timeout_s,
    )
    assert stream.acks is not None
    part: list[Any] = []
    with stream.follow():
        for batch in stream.loader:
            part += zip(batch.sample_ids, batch.tensors["digests"], strict=True)
            if not batch.ends_step:
                continue
            step += 1
            chain.append([step, part])
            part = []
            time.sleep(site.pace_s)
            stream.acks.on_step(step)
            if step % SAVE == 0 or step == STEPS:
                write_json(site.folder / f"state-{step}-{rank}-{world}.json", chain)
                if world > 1:
                    dist.barrier()
                stream.acks.on_checkpoint(step)
        if not stream.loader.stopped_by:
            stream.finish()
    if stream.loader.stopped_by:
        os._exit(STOPPED)
    write_json(site.folder / f"final-{rank}.json", chain)
    if world > 1:
        dist.destroy_process_group()


def serve(site: ArrivalSite) -> None:
    from draftworks.programs import control

    os.environ["DRAFTWORKS_CONTROL_TOKEN"] = SECRET.decode()
    assert site.control is not None
    control._serve(site.database, site.control, None)


def read_chain(folder: Path, rank: int, world: int) -> tuple[int, list[Any]]:
    """The newest state that all ranks of a training have saved, which may have been of another size."""
    saved: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("state-*.json"):
        step, of_rank, of_world = map(int, path.stem.split("-")[1:])
        saved.setdefault((step, of_world), {})[of_rank] = path
    newest, size = max((each for each, found in saved.items() if len(found) == each[1]), default=(0, 0))
    return newest, json.loads(saved[newest, size][rank].read_text()) if size == world else []


def write_json(path: Path, value: Any) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(value))
    os.replace(path.with_suffix(".tmp"), path)


class ArrivalCast:
    """The processes of a site by name: control, p0 and so on, and t0, t1 for the ranks of the trainer."""

    def __init__(self, site: ArrivalSite, producers: int = 1, world: int = 1) -> None:
        self.site = site
        self.producers = producers
        self.world = world
        self.running: dict[str, multiprocessing.process.BaseProcess] = {}
        self._attempts = 0
        site.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ArrivalCast:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.end(name)

    def start(self, name: str, site: ArrivalSite | None = None) -> None:
        site = site or self.site
        if name == "train":
            self._attempts += 1
            for rank in range(self.world):
                rendezvous = site.folder / f"rendezvous{self._attempts}"
                self._start(f"t{rank}", train, site, rank, self.world, rendezvous)
        elif name == "control":
            self._start(name, serve, site)
        else:
            self._start(name, produce, site, int(name[1:]))

    def wait(self, *names: str) -> list[int | None]:
        """Wait for ends; returns the exit codes."""
        wait_until(lambda: not any(self.running[name].is_alive() for name in names), lambda: f"the end of {names}")
        return [self.running.pop(name).exitcode for name in names]

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        os.kill(self.running[name].pid or 0, signum)

    def end(self, name: str) -> None:
        process = self.running.pop(name)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()

    def read_log(self, name: str) -> str:
        return (self.site.folder / f"{name}.log").read_text()

    def query(self, statement: str) -> list[Any]:
        try:
            with sqlite3.connect(self.site.database) as database:
                return database.execute(statement).fetchall()
        except sqlite3.Error:
            return []

    def count_steps(self) -> int:
        return (self.query("SELECT max(global_step) FROM acks") or [(0,)])[0][0] or 0

    def read_order(self) -> list[tuple[str, ...]]:
        controller = resolve_control_plane("disaggregated", "draft", self.site.database).controller
        return [step.sample_ids for step in controller.read_order()]

    def list_problems(self, chains: bool = True) -> list[str]:
        """What is wrong with a training that is done: samples lost, doubled or altered, and what it left behind.

        Args:
            chains: look at what each rank read, too; its number of ranks has not changed.
        """
        problems, order = [], self.read_order()
        taken = [sample_id for step in order for sample_id in step]
        problems += ["twice in the order"] * (len(taken) != len(set(taken)))
        problems += [f"lost {SAMPLES - len(set(taken))}"] * (set(taken) != {row.sample_id for row in ROWS})
        problems += self._list_other_tensors(order) if chains else []
        states = dict(self.query("SELECT state, count(*) FROM tasks GROUP BY state"))
        problems += [f"tasks {states}"] * (set(states) != {2})
        left = self.site.open_store().health()["samples"]
        problems += [f"{left} features left in the store"] * bool(left)
        return problems

    def _list_other_tensors(self, order: list[tuple[str, ...]]) -> list[str]:
        """What a rank read that is not what the order has, or not as it was captured."""
        problems: list[str] = []
        engine = BagEngine(self.site.target, {})
        expected = {}
        for row in ROWS:
            tokens = {
                "input_ids": torch.from_numpy(row.input_ids.astype(np.int64)),
                "loss_mask": torch.from_numpy(row.loss_mask),
            }
            streams = engine.make_streams(row.input_ids.tolist(), [LayerTap(2)])
            expected[row.sample_id] = digest_sample({**tokens, **streams})
        chains = [json.loads((self.site.folder / f"final-{rank}.json").read_text()) for rank in range(self.world)]
        for number, samples in enumerate(order):
            read = [pair for chain in chains for pair in chain[number][1]]
            if self.world == 1:
                problems += [f"step {number + 1}: another order"] * ([each for each, _ in read] != list(samples))
            problems += [f"step {number + 1}: others"] * (sorted(each for each, _ in read) != sorted(samples))
            problems += [f"step {number + 1}: other tensors"] * any(expected[each] != found for each, found in read)
        return problems

    def run_random(self, rng: random.Random, kills: int) -> None:
        """Train to the end while random processes are killed, ended and stopped; what ends is started again."""
        for name in [*(["control"] if self.site.control else []), *(f"p{n}" for n in range(self.producers)), "train"]:
            self.start(name)
        resumes: list[tuple[float, int]] = []
        due, trained = time.monotonic() + rng.uniform(0.5, 4), False
        until = time.monotonic() + 10 * HANG_S
        while not trained or any(name.startswith("p") for name in self.running):
            assert time.monotonic() < until, f"hangs: {self.running}"
            now = time.monotonic()
            for entry in [each for each in resumes if now >= each[0]]:
                resumes.remove(entry)
                _signal(entry[1], signal.SIGCONT)
            for name in [each for each, process in self.running.items() if not process.is_alive()]:
                if name not in self.running:
                    continue
                code = self.running.pop(name).exitcode
                if name.startswith("t") and code:
                    for other in [each for each in self.running if each.startswith("t")]:
                        self.end(other)
                    self.start("train")
                elif name.startswith("t"):
                    trained = trained or not any(each.startswith("t") for each in self.running)
                elif not trained and (name == "control" or self._has_tasks()):
                    self.start(name)
            if kills and now >= due and not trained and self.running:
                kills, due = kills - 1, now + rng.uniform(0.3, 3)
                pid = self.running[rng.choice(sorted(self.running))].pid or 0
                signum = rng.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], [6, 2, 3])[0]
                _signal(pid, signum)
                if signum == signal.SIGSTOP:
                    resumes.append((now + rng.choice([0.5, 2.0, 6.0]), pid))
            time.sleep(0.05)
        if self.site.control:
            self.end("control")

    def _has_tasks(self) -> bool:
        return not self.query("SELECT 1 FROM facts") or bool(self.query("SELECT 1 FROM tasks WHERE state < 2"))

    def _start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        multiprocessing.set_forkserver_preload(["draftworks.training.trainer", "draftworks.stream.topologies"])
        log = self.site.folder / f"{name}.log"
        self.running[name] = _CONTEXT.Process(target=_run, args=(log, work, args), daemon=True)
        self.running[name].start()


def make_site(folder: Path, target: TargetFiles, remote: bool = False, **changes: Any) -> ArrivalSite:
    control = f"127.0.0.1:{reserve_port()}" if remote else None
    return ArrivalSite(folder, target, control, **changes)


def _run(log: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1), os.dup2(handle, 2)
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _signal(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _stop_at_put(mark: Path) -> None:
    """Stand still before the first put, without renewing leases; a signal might stop a thread that holds the database."""
    put = KeyedSharedDirStore.put
    LeaseKeeper.renewing = lambda self: nullcontext()  # type: ignore[method-assign,assignment,return-value]

    def stop_once(self, ref, tensors):
        if not mark.exists():
            mark.write_text(ref.sample_id)
            wait_until(mark.with_suffix(".go").exists)
        return put(self, ref, tensors)

    KeyedSharedDirStore.put = stop_once  # type: ignore[method-assign]
