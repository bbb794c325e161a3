"""Weights sharded within a node, with a copy on every node: the same training, and checkpoints that either form reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from resumable_runs import ResumableRun, changed
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from draftworks.errors import ConfigError
from draftworks.training.backend import ensure_process_group
from draftworks.training.fsdp_backend import make_mesh

pytestmark = pytest.mark.slow

STOPPED_AFTER = 7
NODES = changed(log_every=1, save_every=0, shard_within="node")
JOB = changed(log_every=1, save_every=0)


def _train_on_two_nodes(rank: int, folder: Path) -> None:
    """Four ranks, two to a node: a whole training, and two that change how they shard in the middle."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    straight = ResumableRun(folder / "nodes", NODES, micro=2).trainer(rank, 4)
    straight.fit()
    shards = list(straight.backend.parameters().values())
    assert shards
    assert all(isinstance(shard, DTensor) and shard.device_mesh.shape == (2, 2) for shard in shards)
    _keep(straight.weights(), folder / "nodes", rank)
    for name, first, second in (("to_job", NODES, JOB), ("to_nodes", JOB, NODES)):
        ResumableRun(folder / name, first, micro=2).trainer(rank, 4, stop_after=STOPPED_AFTER).fit()
        resumed = ResumableRun(folder / name, second, micro=2).trainer(rank, 4)
        resumed.fit()
        _keep(resumed.weights(), folder / name, rank)


def _make_uneven_mesh(rank: int) -> None:
    with pytest.raises(ConfigError, match="shard_within: node needs as many ranks on each node, found 2 ranks, 3"):
        make_mesh("cpu", dist.get_world_size(), 3)


def _keep(weights: dict[str, torch.Tensor], folder: Path, rank: int) -> None:
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hsdp")
    with ensure_process_group(torch.device("cpu")):
        _keep(ResumableRun(folder / "straight", JOB, micro=4).finished().weights(), folder / "straight", rank=0)
    on_ranks(4, tmp_path_factory.mktemp("ranks"), _train_on_two_nodes, folder)
    return folder


@pytest.mark.parametrize("name", ["nodes", "to_job", "to_nodes"])
def test_weights_are_those_of_one_rank_to_rounding(trained: Path, name: str) -> None:
    found = load_file(trained / name / "weights.safetensors")
    for key, tensor in load_file(trained / "straight" / "weights.safetensors").items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)


def test_nodes_of_unequal_size_are_refused(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _make_uneven_mesh)
