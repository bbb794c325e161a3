"""Files of a shared folder: whole or absent, one winner among writers, and never outside."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from shared_dir_toys import file_of, generation, put
from torch import Tensor
from waiting import HANG_S

from draftworks.errors import StoreError
from draftworks.features import sample_folder
from draftworks.features.contracts import SampleRef
from draftworks.features.shared_dir_store import SharedDirFeatureStore

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Writer:
    """A process that puts a sample, of a value two higher each time, whenever it is told to."""

    process: BaseProcess
    orders: Connection
    refs: Connection

    @classmethod
    def start(cls, root: Path, value: float = 0.0) -> Writer:
        orders, refs = FORK.Pipe(duplex=False), FORK.Pipe(duplex=False)
        process = FORK.Process(target=_put_whenever_told, args=(root, value, orders[0], refs[1]))
        process.start()
        orders[0].close()
        refs[1].close()
        return cls(process, orders[1], refs[0])

    def order(self, puts: int) -> None:
        for _ in range(puts):
            self.orders.send(True)

    def end(self) -> int:
        self.process.join()
        for each in (self.orders, self.refs):
            each.close()
        return self.process.exitcode


def _put_whenever_told(root: Path, value: float, orders: Connection, refs: Connection) -> None:
    store = SharedDirFeatureStore(root)
    while orders.recv():
        ref = SampleRef("s1", "", "", "", {"last": ""}, {})
        refs.send(store.put(ref, {"last": torch.full((400, 64), value)}))
        value += 2.0


def whole(tensor: Tensor) -> bool:
    return tensor.shape == (400, 64) and bool((tensor == tensor[0, 0]).all())


def newest_ref(store: SharedDirFeatureStore, root: Path) -> SampleRef:
    """As a ref that the killed writer did not get to hand over would be."""
    newest = max(path.name for path in (root / "samples").glob("*/*"))
    return SampleRef("s1", "", "", store.uri, {"last": f"{newest}/last"}, {})


def test_a_killed_writer_leaves_whole_samples_or_none(tmp_path: Path):
    generator = random.Random(7)
    for attempt in range(3):
        root = tmp_path / str(attempt)
        writer = Writer.start(root)
        writer.order(500)
        writer.refs.recv()
        time.sleep(generator.uniform(0.0, 0.05))
        writer.process.kill()
        assert writer.end() == -signal.SIGKILL
        store = SharedDirFeatureStore(root, staging_age_s=0.0)
        ref = newest_ref(store, root)
        assert whole(store.get(ref)[0]["last"])
        store.gc()
        assert store.health() | {"samples": 1, "staging_files": 0} == store.health()
        assert len(list((root / "samples").glob("*/*"))) == 1


def put_and_die(root: Path, module: str, name: str, when: str) -> None:
    holder = importlib.import_module(module)
    done = getattr(holder, name)

    def die(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            done(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, name, die)
    ref = SampleRef("s1", "", "", "", {"last": ""}, {})
    SharedDirFeatureStore(root).put(ref, {"last": torch.full((400, 64), 1.0)})


@pytest.mark.parametrize(
    ("module", "name", "when", "samples"),
    [
        ("draftworks.features.sample_file", "view_buffer", "after", 0),
        ("draftworks.features.shared_dir_store", "fsync", "before", 0),
        ("os", "link", "before", 0),
        ("os", "link", "after", 1),
    ],
    ids=["header-only", "unsynced", "unpublished", "published"],
)
def test_a_writer_killed_at_a_given_moment_leaves_a_whole_sample_or_none(
    tmp_path: Path, module: str, name: str, when: str, samples: int
):
    store = SharedDirFeatureStore(tmp_path, staging_age_s=0.0)
    writer = FORK.Process(target=put_and_die, args=(tmp_path, module, name, when))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert store.health() | {"samples": samples, "staging_files": 1} == store.health()
    if samples:
        assert whole(store.get(newest_ref(store, tmp_path))[0]["last"])
    store.gc()
    assert store.health() | {"samples": samples, "staging_files": 0} == store.health()


def test_two_processes_that_put_one_sample_end_with_one_whole_winner(tmp_path: Path):
    writers = [Writer.start(tmp_path, value) for value in (0.0, 1.0)]
    for writer in writers:
        writer.order(30)
    refs = [writer.refs.recv() for writer in writers for _ in range(30)]
    for writer in writers:
        writer.orders.send(False)
        assert writer.end() == 0
    assert len({generation(ref) for ref in refs}) == len(refs) == 60
    store = SharedDirFeatureStore(tmp_path, retain_on_release=True)
    winner = max(refs, key=generation)
    assert file_of(tmp_path).name == winner.feature_keys["last"].partition("/")[0]
    assert whole(store.get(winner)[0]["last"])
    for loser in refs:
        if loser is not winner:
            with pytest.raises(StoreError, match="superseded"):
                store.get(loser)


def test_generations_rise_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = SharedDirFeatureStore(tmp_path)
    first = put(store, 1)
    monkeypatch.setattr(sample_folder.time, "time_ns", lambda: 10**9)
    assert generation(put(store, 1)) == generation(first) + 1


def test_of_two_puts_with_one_generation_both_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both see the same clock and the same newest generation; the second finds the name taken."""
    store, barrier = SharedDirFeatureStore(tmp_path), threading.Barrier(2)
    link, tried = os.link, []

    def link_together(source: Path, target: Path) -> None:
        tried.append(target)
        if len(tried) <= 2:
            barrier.wait(HANG_S)
        link(source, target)

    monkeypatch.setattr(sample_folder.time, "time_ns", lambda: 10**9)
    monkeypatch.setattr(sample_folder.os, "link", link_together)
    other = SharedDirFeatureStore(tmp_path)
    thread = threading.Thread(target=put, args=(other, 1))
    thread.start()
    put(store, 1)
    thread.join()
    assert len(tried) == 3
    assert tried[0] == tried[1]
    assert file_of(tmp_path) == tried[2]


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS sends a request again when its answer is lost, and the second finds what the first has made."""
    store, link = SharedDirFeatureStore(tmp_path), os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(sample_folder.os, "link", link_twice)
    ref = put(store, 1)
    assert torch.equal(store.get(ref)[0]["last"], toy_tensors(ref)["last"])
    assert store.health() | {"samples": 1, "staging_files": 0} == store.health()


def test_a_refusing_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = SharedDirFeatureStore(tmp_path)

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftworks.features.shared_dir_store.fsync", refuse)
    with pytest.raises(StoreError, match="sample s1 cannot be written to .*No space left"):
        put(store, 1)
    assert store.health() | {"samples": 0, "staging_files": 0} == store.health()


def test_a_folder_that_cannot_be_a_store_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file cannot be opened as a shared feature store"):
        SharedDirFeatureStore(tmp_path / "file")
    SharedDirFeatureStore(tmp_path / "store")
    (tmp_path / "store" / "store.json").write_text("{")
    with pytest.raises(StoreError, match="store.json cannot be read"):
        SharedDirFeatureStore(tmp_path / "store")


HOSTILE = [
    "../../escape",
    "/etc/passwd",
    "a" * 5000,
    "",
    ".",
    "nul\0byte",
    "two\nlines",
    "né\ud800",
    '"seal":"' + "0" * 64 + '"',
]


@pytest.mark.parametrize("sample_id", HOSTILE)
def test_hostile_ids_stay_inside_and_apart(tmp_path: Path, sample_id: str):
    store = SharedDirFeatureStore(tmp_path / "store")
    other = put(store, 1)
    ref = store.put(replace(toy_ref(2), sample_id=sample_id), toy_tensors(toy_ref(2)))
    assert torch.equal(store.get(ref)[0]["last"], toy_tensors(toy_ref(2))["last"])
    assert torch.equal(store.get(other)[0]["last"], toy_tensors(other)["last"])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert all(re.fullmatch(r"store\.json|[0-9a-f]{32}\.g\d+\.safetensors", path.name) for path in files)
