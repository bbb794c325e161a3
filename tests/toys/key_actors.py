"""A producer and a consumer of samples that share features, in steps between which a test, or a SIGKILL, ends them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Timer

import torch
from dataflow_toys import toy_slim_ref
from waiting import HANG_S

from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import PromptTask
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.step_acks import free_unused, reconcile_on_restart

CONTENTS, SAMPLES = 5, 40
LEASE_S = 0.5


def make_ref(number: int, rng: random.Random) -> SampleRef:
    """A sample of one of few contents, with a mask of its own or of few."""
    ref = toy_slim_ref(f"s{number}")
    content, mask = number % CONTENTS, rng.choice([f"mask{number}", f"mask-{number % CONTENTS}"])
    return replace(ref, feature_keys={"hf2": f"hf2-{content}", "last": mask})


class Producer:
    """Captures one task at a time, in steps; it may die between any two."""

    def __init__(
        self, name: str, controller: DataFlowController, store: KeyedFeatureStore, refs: list[SampleRef]
    ) -> None:
        self.name = name
        self.controller = controller
        self.store = store
        self.refs = {ref.sample_id: ref for ref in refs}
        self.put: set[str] = set()
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        while True:
            leases = self.controller.lease_tasks(self.name)
            if not leases:
                yield
                continue
            (lease,) = leases
            frees = lease.frees
            refs = [replace(self.refs[each], source_task_id=lease.task.task_id) for each in lease.task.sample_ids]
            while refs:
                yield
                missing = set(self.store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
                yield
                for ref in refs:
                    names = tuple(name for name, key in ref.feature_keys.items() if key in missing)
                    shapes = {name: ref.feature_specs[name].shape for name in names}
                    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
                    self.put |= set(ref.select(names).feature_keys.values())
                    self.store.put(ref.select(names), tensors)
                    yield
                done = self.controller.commit_samples(refs, [lease], frees)
                refs, frees = [ref for ref in refs if ref.sample_id in done.stale], done.frees
                self.put &= {key for ref in refs for key in ref.feature_keys.values()}


class Consumer:
    """Trains what is committed, two samples a step; it saves now and then, and may die between any two of its steps."""

    def __init__(
        self,
        controller: DataFlowController,
        store: KeyedFeatureStore,
        free_at: str,
        saved: int,
        save: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.controller = controller
        self.save = save
        self.store = store
        self.free_at = free_at
        self.saved = saved
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        step, cursor, waiting, freed = self.saved, 0, [], ()
        reconcile_on_restart(self.controller, self.store, step, release=True)
        free_unused(self.controller, self.store)
        while True:
            yield
            page = self.controller.read_refs(cursor, 3, acked=False)
            cursor, waiting = page.cursor, [*waiting, *page.refs]
            if len(waiting) < 2:
                free_unused(self.controller, self.store, freed=freed)
                freed = ()
                continue
            taken, waiting = waiting[:2], waiting[2:]
            for ref in taken:
                self.store.release(self.store.get(ref)[1])  # raises if a feature is gone
            step += 1
            yield
            release = self.free_at == "step"
            freed = self.controller.ack_step([ref.sample_id for ref in taken], step, 0, release, freed).unused
            yield
            self.store.free(freed)
            if step % 3 == 0:
                yield
                self.saved = step
                self.save(step)
                yield
                self.controller.record_checkpoint(step, release=True)


def add_tasks(controller: DataFlowController, refs: list[SampleRef], size: int) -> None:
    groups = [refs[first : first + size] for first in range(0, len(refs), size)]
    controller.add_tasks(
        [PromptTask(f"t{n}", "run", tuple(ref.sample_id for ref in group)) for n, group in enumerate(groups)]
    )


def is_over(controller: DataFlowController) -> bool:
    """Whether everything is trained, but for one sample that fills no step."""
    return not controller.count_tasks().open and len(list(controller.iterate_refs(acked=False))) <= 1


def open_store_at(address_file: Path | None, folder: Path) -> KeyedFeatureStore:
    if address_file is None:
        return KeyedSharedDirStore(folder / "store")
    from draftworks.features.mooncake_store import MooncakeFeatureStore

    return MooncakeFeatureStore(address_file, HANG_S)


def open_plane(folder: Path) -> DataFlowController:
    """Return the control plane of a folder, where leases of the dead are over soon."""
    store = SQLiteMetadataStore(folder / "control.sqlite")
    return DataFlowController("run", store, lease_s=LEASE_S, consumer_lease_s=LEASE_S, max_attempts=10**6)


def save(path: Path, step: int) -> None:
    staged = path.with_suffix(".new")
    staged.write_text(f"{step}")
    os.replace(staged, path)


def act(name: str, folder: Path, address_file: Path | None, free_at: str, seed: int, dies: bool) -> None:
    """Be the consumer or a producer, in a process of its own, until all is trained, or until a SIGKILL if it `dies`.

    It comes between two steps, or at any time.
    """
    rng, controller, store = random.Random(f"{seed} {name}"), open_plane(folder), open_store_at(address_file, folder)
    refs = [make_ref(number, random.Random(number)) for number in range(SAMPLES)]
    saved = folder / "saved"
    actor = Producer(name, controller, store, refs)
    if name == "consumer":
        last = int(saved.read_text()) if saved.exists() else 0
        actor = Consumer(controller, store, free_at, last, partial(save, saved))
    life = rng.randrange(1, 40) if dies and rng.random() < 0.5 else 10**9
    if dies and life == 10**9:
        Timer(rng.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number, _ in enumerate(actor.steps):
        if number >= life:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_over(controller) and not dies:
            return
        time.sleep(rng.uniform(0.0, 0.005))
