"""A shard keeps what was put into it, or says what is wrong and where."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.shards import ShardReader, ShardWriter, read_header, staging_name, staging_owner_is_dead

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)


def publish(folder: Path, tensors: dict[str, torch.Tensor]):
    writer = ShardWriter(folder, folder, shard_bytes=1 << 20)
    for key, tensor in tensors.items():
        writer.add(key, tensor)
    return writer.publish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
)
def test_read_equals_written(tmp_path: Path, shapes, dtypes):
    tensors = {f"{i:032x}": (torch.randn(shape) * 9).to(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes))}
    header = publish(tmp_path, tensors)
    reader = ShardReader()
    for key, tensor in tensors.items():
        assert torch.equal(reader.get(header, key), tensor)
        assert reader.get(header, key).dtype == tensor.dtype


def test_same_content_gets_the_same_name_whatever_the_order(tmp_path: Path):
    tensors = {f"{i:032x}": torch.full((3, 2), float(i)) for i in range(4)}
    first = publish(tmp_path, tensors)
    second = publish(tmp_path, dict(reversed(tensors.items())))
    assert first.path == second.path
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_shard_cut_anywhere_is_noticed_and_named(tmp_path: Path):
    header = publish(tmp_path, {"a" * 32: torch.randn(30, 4)})
    whole = header.path.read_bytes()
    for length in (0, 4, 20, len(whole) // 2, len(whole) - 1):
        header.path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match=header.path.name):
            read_header(header.path).require_complete()
        with pytest.raises(StoreError, match=f"{header.path.name}.*{'a' * 32}.*truncated"):
            ShardReader().get(header, "a" * 32)


def test_any_altered_byte_of_the_data_is_noticed_with_its_sample(tmp_path: Path):
    header = publish(tmp_path, {"a" * 32: torch.randn(5, 4), "b" * 32: torch.randn(5, 4)})
    whole = header.path.read_bytes()
    start = header.expected_bytes - header.nbytes
    for position in range(start, len(whole), 7):
        header.path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        problems = []
        for key in ("a" * 32, "b" * 32):
            try:
                ShardReader().get(read_header(header.path), key)
            except StoreError as error:
                problems.append((key, str(error)))
        assert len(problems) == 1
        assert problems[0][0] in problems[0][1]
        assert header.path.name in problems[0][1]


def test_altered_checksums_in_the_header_are_noticed(tmp_path: Path):
    header = publish(tmp_path, {"a" * 32: torch.randn(5, 4)})
    checksum = header.entries["a" * 32].checksum
    forged = header.path.read_bytes().replace(checksum.encode(), b"0" * len(checksum))
    header.path.write_bytes(forged)
    with pytest.raises(StoreError, match="altered"):
        read_header(header.path)


def test_tensors_outlive_their_closed_shard(tmp_path: Path):
    one = publish(tmp_path, {"a" * 32: torch.ones(1000, 4)})
    two = publish(tmp_path, {"b" * 32: torch.zeros(1000, 4)})
    reader = ShardReader(max_open=1)
    first = reader.get(one, "a" * 32)
    reader.get(two, "b" * 32)
    assert reader.open_shards == 1
    reader.close()
    assert first.eq(1).all()


def test_staging_of_this_process_belongs_to_the_living():
    assert staging_owner_is_dead(staging_name()) is False
    assert staging_owner_is_dead("elsewhere.example~1~abc.tmp") is None


def test_a_staging_file_of_another_container_is_not_ours_to_judge(monkeypatch):
    monkeypatch.setattr("draftworks.features.shards.process_table", lambda: "host+4026532999")
    name = staging_name()
    assert staging_owner_is_dead(name) is False
    monkeypatch.setattr("draftworks.features.shards.process_table", lambda: "host")
    assert staging_owner_is_dead(name) is None


def test_refused_write_leaves_nothing_behind_and_loses_nothing(tmp_path: Path):
    writer = ShardWriter(tmp_path / "absent", tmp_path, shard_bytes=1)
    writer.add("a" * 32, torch.ones(3))
    with pytest.raises(StoreError, match="cannot be written"):
        writer.publish()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "absent").mkdir()
    assert writer.publish().entries.keys() == {"a" * 32}


def test_tensors_that_share_memory_are_stored_each(tmp_path):
    """An engine may give one tensor for two streams; what is kept without a copy must still be written."""
    writer = ShardWriter(tmp_path, tmp_path, 1 << 20, keep_tensors=True)
    both = torch.arange(6.0)
    for key in ("a", "b", "c"):
        writer.add(key, both)
    writer.discard("a")
    writer.add("a", both)
    header = writer.publish()
    assert header is not None
    assert set(header.entries) == {"a", "b", "c"}


def test_a_shard_is_a_file_of_safetensors_with_the_xxh3_of_every_tensor(tmp_path: Path):
    """XXH3 of 128 bits of the bytes 0 … 7, as xxhash 4.1.0 gives it; and safetensors' own reader has the tensors."""
    tensors = {"b": torch.arange(8, dtype=torch.uint8), "a": torch.ones(3, dtype=torch.float64), "c": torch.empty(0, 4)}
    header = publish(tmp_path, tensors)
    assert header is not None
    assert header.entries["b"].checksum == "e1e4432a62217fe4cfd50c61c8bb98c1"
    found = load_file(header.path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def write_as_before(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A shard of schema 1, as 0.1.0 wrote it: checksums are the first 16 digits of a SHA-256."""
    sums = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for key, tensor in tensors.items()}
    shapes = [[key, "float32", list(tensor.shape), sums[key]] for key, tensor in sorted(tensors.items())]
    name = hashlib.sha256(json.dumps(shapes, separators=(",", ":")).encode()).hexdigest()[:16]
    metadata = {"schema": "draftworks.shard.1", "digest": name, "checksums": json.dumps(sums)}
    save_file(tensors, folder / f"{name}.safetensors", metadata=metadata)
    return folder / f"{name}.safetensors"


def test_shards_of_schema_1_are_read_and_their_damage_is_noticed(tmp_path: Path):
    tensors = {"a" * 32: torch.arange(6.0), "b" * 32: torch.ones(2, 2)}
    path = write_as_before(tmp_path, tensors)
    reader = ShardReader()
    for key, tensor in tensors.items():
        assert torch.equal(reader.get(read_header(path), key), tensor)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"{path.name}.*{'b' * 32}"):
        ShardReader().get(read_header(path), "b" * 32)


def test_a_store_of_before_takes_new_shards_beside_the_old(tmp_path: Path):
    shards = tmp_path / "shards"
    shards.mkdir()
    old, new = {"a" * 32: torch.arange(6.0)}, {"b" * 32: torch.ones(2, 2)}
    write_as_before(shards, old)
    store = LocalFeatureStore(tmp_path)
    assert store.find_missing([*old, *new]) == [*new]
    ref = SampleRef("s", "run", "task", "", {"one": "a" * 32, "two": "b" * 32}, {})
    store.put(ref, {"one": old["a" * 32], "two": new["b" * 32]})
    store.flush()
    schemas = {read_header(path).schema: set(read_header(path).entries) for path in shards.glob("*.safetensors")}
    assert schemas == {"draftworks.shard.1": {*old}, "draftworks.shard.2": {*new}}
    again = LocalFeatureStore(tmp_path)
    tensors, _ = again.get(ref)
    assert torch.equal(tensors["one"], old["a" * 32])
    assert torch.equal(tensors["two"], new["b" * 32])
    assert again.verify().ok


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path):
    with pytest.raises(StoreError, match=r"key aa.*found complex64"):
        publish(tmp_path, {"aa": torch.zeros(2, dtype=torch.complex64)})
