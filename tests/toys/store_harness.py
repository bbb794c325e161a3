"""What the contract of feature stores needs of a store under test: open it again, damage it, use it elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from features_toys import toy_ref, toy_tensors
from torch import Tensor
from waiting import HANG_S

from draftworks.features.contracts import FeatureStore, KeyedFeatureStore, SampleRef


class StoreHarness(ABC):
    """A store under test, with the traits by which the contract asks.

    Attributes:
        defers: what is freed under lease takes its bytes until the last lease ends: tensors are no copies.
        shared: other processes read what one process put. Otherwise they are refused.
        one_row_per_token: tensors with other lengths than the sample's tokens are refused.
        adds: features that `get` returns beside those of the ref.
        start_method: how other processes of the tests start; "spawn" where a library does not survive a fork.
    """

    defers = True
    shared = True
    one_row_per_token = False
    adds: frozenset[str] = frozenset()
    start_method = "fork"

    @abstractmethod
    def open(self, max_hold_age_s: float = 3600.0) -> FeatureStore:
        """Open the same store again, as another process would; a store of one process returns itself."""

    @abstractmethod
    def alter(self, stored: Tensor) -> None:
        """Change one byte of the stored copy of a tensor."""

    @abstractmethod
    def truncate(self, stored: Tensor) -> None:
        """Cut off the end of the stored copy of a tensor."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Return the bytes that the stored tensors take up physically, with headers."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Name what is neither a stored tensor nor belongs to the store: what interrupted writers left."""

    def fill(self, index: int) -> SampleRef:
        """Store a toy sample and publish it."""
        return put(self.open(), index)


@dataclass
class FileHarness(StoreHarness):
    """A store in files below `root`, of which `opener` gives another object for the same folder."""

    root: Path
    opener: Callable[[Path, float], FeatureStore]
    defers: bool = True
    one_row_per_token: bool = False
    adds: frozenset[str] = frozenset()

    def open(self, max_hold_age_s: float = 3600.0) -> FeatureStore:
        return self.opener(self.root, max_hold_age_s)

    def alter(self, stored: Tensor) -> None:
        path, content, start = self._find(stored)
        content[start] ^= 0x10
        path.write_bytes(content)

    def truncate(self, stored: Tensor) -> None:
        path, content, _ = self._find(stored)
        path.write_bytes(content[:-1])

    def stored_bytes(self) -> int:
        paths = [*self.root.rglob("*.safetensors"), *self.root.rglob("*.tmp")]
        return sum(path.stat().st_size for path in paths)

    def leftovers(self) -> list[str]:
        return [path.name for path in (self.root / "staging").iterdir()]

    def _find(self, stored: Tensor) -> tuple[Path, bytearray, int]:
        wanted = bytes(stored.contiguous().numpy().tobytes())
        for path in self.root.rglob("*.safetensors"):
            content = bytearray(path.read_bytes())
            if wanted in content:
                return path, content, content.index(wanted)
        raise AssertionError(f"no file below {self.root} has the tensor")


def put(store: FeatureStore, index: int, plus: float = 0.0) -> SampleRef:
    """Put a toy sample into an open store and publish it."""
    return publish(store, toy_ref(index), {name: t + plus for name, t in toy_tensors(toy_ref(index)).items()})


def publish(store: FeatureStore, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
    stored = store.put(ref, tensors)
    if isinstance(store, KeyedFeatureStore):
        store.flush()
    return stored


def run_elsewhere(harness: StoreHarness, work: Callable[..., str], *args: Any) -> str:
    """Return the answer of `work(harness, *args)` in another process; AssertionError if that fails."""
    receiver, process = _start(harness, _answer, work, *args)
    with receiver:
        assert receiver.poll(HANG_S), "no answer of the other process"
        answer = receiver.recv()
    process.join()
    assert process.exitcode == 0, answer
    return answer


def kill_at_work(harness: StoreHarness, work: Callable[..., None], after: int, wait_s: float) -> list[str]:
    """Kill another process that does `work(harness, send)`; return what it had sent.

    Args:
        after: messages to wait for before the kill.
        wait_s: further wait, so that the kill comes at any moment.
    """
    receiver, process = _start(harness, work)
    sent = []
    with receiver:
        for _ in range(after):
            assert receiver.poll(HANG_S), "the other process sends nothing"
            sent.append(receiver.recv())
        time.sleep(wait_s)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        while receiver.poll(0):
            try:
                sent.append(receiver.recv())
            except EOFError:
                break
    return sent


def _start(harness: StoreHarness, target: Callable[..., None], *args: Any) -> tuple[Connection, Any]:
    context = multiprocessing.get_context(harness.start_method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(harness, sender.send, *args), daemon=True)
    process.start()
    sender.close()
    return receiver, process


def _answer(harness: StoreHarness, send: Callable[[str], None], work: Callable[..., str], *args: Any) -> None:
    try:
        send(work(harness, *args))
    except BaseException as error:
        send(repr(error))
        raise
