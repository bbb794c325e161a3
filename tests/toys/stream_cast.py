"""All processes of a streamed training, started again when they are killed, as the launcher does it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from forked_ranks import ForkedRanks
from ports import reserve_port
from stream_toys import StreamFiles
from waiting import HANG_S, find_now, meanwhile, wait_until

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import MemoryRun, RunFile, StoreSpec, StreamPlace
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.stream_rounds import make_streaming_plan

RANKS = 2
SERVING = ("control", "memory")
CHILDREN = {"owner": "draftworks.mooncake.owner", "master": "mooncake_master"}
"""Processes of the memory's program, by a part of their command lines."""


@dataclass(frozen=True)
class Kill:
    """A process to kill: once so many optimizer steps are done, after a pause."""

    name: str
    step: int
    pause_s: float = 0.0


@dataclass
class StreamCast:
    """Control server, memory, producer and a trainer of two ranks, over Mooncake.

    Attributes:
        killed: the names of what was killed, in order.
        deaths: how often each program was started again.
    """

    files: StreamFiles
    training: TrainingSpec
    killed: list[str] = field(default_factory=list)
    deaths: dict[str, int] = field(default_factory=dict)
    _running: dict[str, ForkedRanks] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self._control = f"127.0.0.1:{reserve_port()}"
        secret = self.files.folder / "control.token"
        secret.write_text("a secret of the tests only")
        self.place = StreamPlace(
            control=self._control,
            token_file=secret,
            store=StoreSpec(kind="mooncake", root=self.files.folder / "memory", timeout_s=HANG_S, put_timeout_s=HANG_S),
            settings=self.files.settings,
        )

    @property
    def database(self) -> Path:
        return self.files.folder / "plane.sqlite"

    def train(self, kills: Sequence[Kill] = ()) -> dict[str, Any]:
        """Run to the end; return the draft's config. Everything is ended then, and the store was empty."""
        try:
            for name in (*SERVING, "produce", "train"):
                self._start(name)
            with meanwhile(lambda: self._kill_in_turn(kills)):
                wait_until(self._look, self._read_logs)
            self._require_empty_store()
        finally:
            for name in ("train", "produce", *SERVING):
                self._end(name)
        return json.loads((self.files.folder / "cast" / "config.json").read_text())

    def _look(self) -> bool:
        """Start again what has died; return whether the trainer has finished."""
        for name, ranks in list(self._running.items()):
            running = ranks.look()
            codes = list(ranks.codes.values())
            if name == "train" and codes == [0] * RANKS:
                return True
            if any(codes) or (name in SERVING and not running):
                assert 2 not in codes, self._read_logs()  # an error for a person
                self._end(name)
                self.deaths[name] = self.deaths.get(name, 0) + 1
                self._start(name)
        return False

    def _start(self, name: str) -> None:
        self._count += 1
        folder = self.files.folder / "runs" / f"{self._count}-{name}"
        folder.mkdir(parents=True)
        if name == "control":
            arguments = [str(self.database), "--listen", self._control, "--token-file", str(self.place.token_file)]
        else:
            arguments = [str(self._make_run(name).save(folder / "run.yaml"))]
        count = RANKS if name == "train" else 1
        log = folder / "out.log"
        self._running[name] = ForkedRanks.start(f"draftworks.programs.{name}", arguments, count, folder, log)

    def _make_run(self, name: str) -> RunFile:
        produce = self.files.produce_run(f"producer{self._count}", self.training)
        produce = produce.model_copy(update={"stream": self.place})
        if name == "produce":
            return produce
        if name == "train":
            return self.files.train_run("cast", training=self.training, stream=self.place)
        return MemoryRun(
            out=produce.out, features=produce.features, streams=produce.streams, steps=produce.steps, stream=self.place
        )

    def _end(self, name: str) -> None:
        ranks = self._running.pop(name, None)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            deadline = time.monotonic() + 10
            for pid in ranks.look() if ranks else ():
                with suppress(psutil.Error):
                    end(psutil.Process(pid))
            while ranks and ranks.look() and time.monotonic() < deadline:
                time.sleep(0.02)

    def _kill_in_turn(self, kills: Sequence[Kill]) -> None:
        with closing(SQLiteMetadataStore(self.database)) as store:
            progress = DataFlowController("draft", store).read_progress
            for each in kills:
                wait_until(lambda step=each.step: progress().acked_step >= step)
                time.sleep(each.pause_s)
                wait_until(lambda name=each.name: self._kill(name))
                self.killed.append(each.name)

    def _kill(self, name: str) -> bool:
        """Kill a process by SIGKILL; False while it is just being started again."""
        with suppress(psutil.Error, KeyError, IndexError):
            if name in CHILDREN:
                (memory,) = self._running["memory"].look()
                found = psutil.Process(memory).children(recursive=True)
                next(each for each in found if CHILDREN[name] in " ".join(each.cmdline())).kill()
            else:
                psutil.Process(self._running[name].look()[-1]).kill()
            return True
        return False

    def _require_empty_store(self) -> None:
        store = open_store(self.place.store)
        run = self.files.produce_run(training=self.training)
        plan = make_streaming_plan(read_feature_set(run.features).refs, run.streams, run.steps, self.place)
        keys = {key for ref in plan.refs for key in ref.feature_keys.values()}
        assert set(store.find_missing(keys)) == keys
        store.close()

    def _read_logs(self) -> str:
        logs = sorted(find_now(self.files.folder / "runs", "**/out.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs[-4:])
