"""Moments are read by any number of ranks whoever wrote them; generators and weights as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import assert_equal, limited_file_size, snapshot_of
from gloo_ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from draftworks.errors import StoreError
from draftworks.training.backend import ensure_process_group
from draftworks.training.moment_files import save_whole_moments
from draftworks.training.snapshot import load_moments, restore_rng, rng_state, save_moments, save_weights_and_rng

WORLDS = (1, 2, 4)
SHAPES = {"even": (8, 2), "uneven": (5, 3), "one_row": (1, 6), "vector": (3,), "empty_last": (6, 2)}


def whole_moments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"{name}.{m}": torch.randn(s, generator=generator) for name, s in SHAPES.items() for m in ("m1", "m2")}


def sharded(whole: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def new_folder(root: Path, world: int) -> Path:
    folder = root / str(world)
    (folder / "optimizer").mkdir(parents=True, exist_ok=True)
    return folder


def save_on_all(root: Path, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    save_moments(new_folder(root, world), sharded(whole_moments(), mesh), None)


def save_on_two_of_four(rank: int, root: Path) -> None:
    pair, mesh = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])
    if rank < 2:
        save_moments(new_folder(root, 2), sharded(whole_moments(), mesh), pair)
    dist.barrier()


def load_what_any_number_saved(rank: int, root: Path) -> None:
    whole, mesh = whole_moments(), init_device_mesh("cpu", (dist.get_world_size(),))
    for world in WORLDS:
        moments = sharded({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, mesh)
        load_moments(root / str(world), moments)
        assert_equal({name: moment.full_tensor() for name, moment in moments.items()}, whole)
    strange = sharded({"even.m1": torch.zeros(8, 3)}, mesh)
    with pytest.raises(StoreError, match="optimizer: rank 0: .*even.m1"):
        load_moments(root / "4", strange)


def save_and_load_on_two(rank: int, root: Path) -> None:
    whole, mesh = whole_moments(), init_device_mesh("cpu", (2,))
    moments = sharded({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, mesh)
    load_moments(root / "1", moments)
    assert_equal({name: moment.full_tensor() for name, moment in moments.items()}, whole)
    save_on_all(root, 2)


def save_and_load_on_four(rank: int, root: Path) -> None:
    save_on_two_of_four(rank, root)
    save_on_all(root, 4)
    load_what_any_number_saved(rank, root)


@pytest.mark.slow
def test_moments_saved_on_any_number_of_ranks_load_on_any_other(tmp_path: Path, group_of_one):
    save_on_all(tmp_path, 1)
    on_ranks(4, new_folder(tmp_path, 4), save_and_load_on_four, tmp_path)
    on_ranks(2, new_folder(tmp_path, 2), load_what_any_number_saved, tmp_path)
    load_what_any_number_saved(0, tmp_path)


def file_of(folder: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of the only file of moments."""
    (path,) = (folder / "optimizer").iterdir()
    with safe_open(path, "pt") as file:
        return {"name": path.name, **file.metadata()}, load_file(path)


def test_a_process_alone_writes_the_file_that_dcp_writes_of_one_rank(tmp_path: Path, group_of_one):
    save_on_all(tmp_path, 1)
    save_whole_moments(new_folder(tmp_path, 0) / "optimizer", whole_moments())
    (header, tensors), (expected, theirs) = file_of(tmp_path / "0"), file_of(tmp_path / "1")
    sharding = [json.loads(each.pop("DCP_SHARDING_INFO")) for each in (header, expected)]
    assert (header, sharding[0]) == (expected, sharding[1])
    assert_equal(tensors, theirs)


def test_two_ranks_and_a_process_alone_read_each_others_moments_to_the_bit(tmp_path: Path, one_rank):
    save_moments(new_folder(tmp_path, 1), whole_moments(), None)
    on_ranks(2, new_folder(tmp_path, 2), save_and_load_on_two, tmp_path)
    for world in (1, 2):
        moments = {name: torch.zeros_like(tensor) for name, tensor in whole_moments().items()}
        load_moments(tmp_path / str(world), moments)
        assert_equal(moments, whole_moments())


ASKED = [{"w.exp_avg": torch.zeros(5, 4)}, {"w.exp_avg": torch.zeros(4, 3)}, {"other": torch.zeros(5, 3)}]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("fixture", "prefix"), [("group_of_one", "rank 0: "), ("one_rank", "")])
def test_a_moment_that_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, request: pytest.FixtureRequest, asked: dict[str, Tensor], fixture: str, prefix: str
):
    request.getfixturevalue(fixture)
    save_moments(new_folder(tmp_path, 1), snapshot_of(1).moments, None)
    with pytest.raises(StoreError, match=f"{tmp_path / '1' / 'optimizer'}: {prefix}.*{next(iter(asked))}"):
        load_moments(tmp_path / "1", asked)


def test_a_training_without_moments_saves_and_loads_none(tmp_path: Path):
    save_moments(tmp_path, {}, None)
    load_moments(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_generator_goes_on_where_it_was_saved(tmp_path: Path):
    cpu = torch.device("cpu")
    torch.manual_seed(7)
    torch.rand(5)
    snapshot = snapshot_of(1)
    snapshot.rng.update(rng_state(cpu))
    expected = torch.rand(9), torch.randn(3)
    save_weights_and_rng(tmp_path, snapshot, rank=3)
    torch.manual_seed(8)
    restore_rng(tmp_path / "rng" / "rank3.safetensors", cpu)
    assert all(torch.equal(draw, again) for draw, again in zip(expected, (torch.rand(9), torch.randn(3))))


def test_only_rank_0_writes_the_weights_and_writes_them_whole(tmp_path: Path):
    for rank in (1, 0):
        assert not (tmp_path / "model.safetensors").exists()
        save_weights_and_rng(tmp_path, snapshot_of(2), rank)
    assert_equal(load_file(tmp_path / "model.safetensors"), snapshot_of(2).weights)
    assert sorted(path.name for path in (tmp_path / "rng").iterdir()) == ["rank0.safetensors", "rank1.safetensors"]


def test_what_the_disk_refuses_is_a_store_error_with_path_and_cause(tmp_path: Path):
    large = snapshot_of(1, {"w.exp_avg": torch.zeros(9000)})
    large.weights["w"] = torch.zeros(9000)
    with limited_file_size(8000):
        with pytest.raises(StoreError, match="model.safetensors: cannot be written: .*File too large"):
            save_weights_and_rng(tmp_path, large, rank=0)
        with pytest.raises(StoreError, match="optimizer/.*: cannot be written: .*File too large"):
            save_moments(new_folder(tmp_path, 1), large.moments, None)
        with ensure_process_group(torch.device("cpu")), pytest.raises(StoreError, match="rank 0: .*File too large"):
            save_moments(new_folder(tmp_path, 1), large.moments, None)
    save_weights_and_rng(tmp_path, large, rank=0)


def test_a_copy_has_tensors_of_its_own():
    state = snapshot_of(1)
    copy = state.copy()
    for kind in ("weights", "moments", "rng"):
        for tensor in getattr(state, kind).values():
            tensor.zero_()
        assert_equal(getattr(copy, kind), getattr(snapshot_of(1), kind))
