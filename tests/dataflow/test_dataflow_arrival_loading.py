"""Queue, distributor and loader together: the batches of a run, again from its log, and what they leave in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from features_toys import filled_store, pad_collate, toy_ref, toy_tensors
from gloo_ranks import on_ranks

from draftworks.dataflow.distributor import RefDistributor
from draftworks.dataflow.order_log import OrderLog, replay_order
from draftworks.dataflow.ref_queues import RefQueue, SampleRefQueue
from draftworks.dataflow.watermark import Watermark
from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.packing import PackLimits
from draftworks.features.queue_loader import QueueDataLoader, SplitStep, packed_steps, padded_steps
from draftworks.features.shared_dir_store import SharedDirFeatureStore

SIZE = 4
SPLITS = {"padded": (padded_steps(SIZE, 2), pad_collate), "packed": (packed_steps(SIZE, PackLimits(15)), None)}


def pack(samples, sample_ids) -> TrainBatch:
    tensors = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    return TrainBatch(tensors, tuple(sample_ids), documents=tuple(len(sample["last"]) for sample in samples))


def train(loader: QueueDataLoader, distributor: RefDistributor) -> list[TrainBatch]:
    """Take every batch; acknowledge every step after all ranks have made it."""
    batches, step = [], []
    for batch in loader:
        batches.append(batch)
        step += batch.sample_ids
        if batch.ends_step:
            if dist.is_initialized():
                dist.barrier()
            assert loader.leases is not None
            loader.leases.release(step)
            distributor.ack_step()
            step = []
    return batches


def load(
    queue: RefQueue | None,
    store: FeatureStore,
    split: SplitStep,
    collate,
    log: OrderLog | None = None,
    prefetch: int = 2,
    size: int = SIZE,
) -> list[TrainBatch]:
    distributor = RefDistributor(queue, size, log)
    return train(QueueDataLoader(distributor, store, split, collate or pack, prefetch), distributor)


def queue_of(refs: list[SampleRef]) -> SampleRefQueue:
    queue = SampleRefQueue(Watermark(samples=99))
    queue.put(refs)
    queue.close()
    return queue


@pytest.mark.parametrize("kind", SPLITS)
def test_a_run_from_its_log_has_the_same_batches_bit_by_bit(tmp_path: Path, kind: str):
    store, refs = filled_store(tmp_path / "store", 15)
    split, collate = SPLITS[kind]
    arrival = [refs[number] for number in torch.randperm(15, generator=torch.Generator().manual_seed(3)).tolist()]
    with OrderLog(tmp_path / "log", SIZE) as log:
        first = load(queue_of(arrival), store, split, collate, log)
    again = load(replay_order(tmp_path / "log", refs, SIZE), store, split, collate, prefetch=0)
    assert sum(len(batch.sample_ids) for batch in first) == 12
    assert [batch.sample_ids for batch in again] == [batch.sample_ids for batch in first]
    for batch, other in zip(first, again, strict=True):
        assert (batch.ends_step, batch.documents) == (other.ends_step, other.documents)
        assert batch.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch.tensors)


def _empty_a_store(rank: int, folder: Path) -> None:
    """Two ranks share a consume-once store; where a step packs into three rows, one rank pads with the other's sample."""
    store = SharedDirFeatureStore(folder / "store")
    queue = None
    if rank == 0:
        queue = queue_of([store.put(ref, toy_tensors(ref)) for ref in map(toy_ref, range(22))])
    dist.barrier()
    batches = load(queue, store, packed_steps(3, PackLimits(7), rank, 2), pack, size=3)
    dist.barrier()
    report = {
        "steps": [batch.ends_step for batch in batches],
        "samples": [batch.sample_ids for batch in batches],
        "left": store.health()["samples"],
        "leases": store.health()["leases"],
        "in_flight": 0 if queue is None else queue.in_flight.samples,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


def test_two_ranks_empty_a_consume_once_store(tmp_path: Path):
    on_ranks(2, tmp_path, _empty_a_store, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["steps"] == second["steps"]
    assert sum(first["steps"]) == 7
    trained = [sample_id for report in (first, second) for ids in report["samples"] for sample_id in ids]
    assert sorted(trained) == sorted(f"s{number}" for number in range(21))
    assert any(not ids for report in (first, second) for ids in report["samples"]), "no step needed padding"
    assert first["left"] == 1, "only the sample that filled no batch is left"
    assert [first["leases"], second["leases"], first["in_flight"]] == [0, 0, 0]
