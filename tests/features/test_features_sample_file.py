"""A sample's file says which hash its checksums are, and files of before are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftworks.errors import StoreError
from draftworks.features.sample_folder import SampleHeader, read_sample_header, read_tensor, seal, write_sample

TENSORS = {"flags": torch.tensor([True, False, True]), "last": torch.arange(6.0).view(2, 3), "none": torch.empty(0, 4)}
ZEROS = "0" * 64


def read(path: Path) -> tuple[SampleHeader, dict[str, torch.Tensor]]:
    with path.open("rb") as stream:
        header = read_sample_header(stream, path)
        return header, {name: read_tensor(stream, header, name) for name in header.tensors}


def test_a_file_is_read_by_us_and_by_safetensors(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    write_sample(path, "s\u00fc", TENSORS)
    header, found = read(path)
    assert (header.sample_id, header.hash) == ("s\u00fc", "xxh3_128")
    assert header.tensors["last"].checksum == xxhash.xxh3_128(TENSORS["last"].numpy().tobytes()).hexdigest()
    for tensors in (found, load_file(path)):
        assert tensors.keys() == TENSORS.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
        assert all(tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def write_as_before(path: Path, kind: str = "sha256") -> None:
    """A file of schema 1, as 0.1.0 wrote it: SHA-256 of every tensor, the seal filled in afterwards."""
    described = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(tensor.numpy().tobytes()).hexdigest(),
        }
        for name, tensor in TENSORS.items()
    }
    record = {"schema": "draftworks.sample.1", "sample_id": "s", "generation": 1, "sealed_by": kind}
    save_file(TENSORS, path, metadata={"record": json.dumps({**record, "tensors": described}), "seal": ZEROS})
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    path.write_bytes(content.replace(f'"seal":"{ZEROS}"'.encode(), f'"seal":"{seal(header)}"'.encode()))


def test_files_of_schema_1_are_read_and_their_damage_is_noticed(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    write_as_before(path)
    header, found = read(path)
    assert header.hash == "sha256"
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match="altered: expected checksum"):
        read(path)


def test_an_unknown_hash_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    write_sample(path, "s", TENSORS)
    with safe_open(path, framework="pt") as file:
        record = file.metadata()["record"].replace("xxh3_128", "crc32")
    save_file(TENSORS, path, metadata={"record": record, "seal": ZEROS})
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    sealed = seal(header)
    path.write_bytes(content.replace(f'"seal":"{ZEROS}"'.encode(), f'"seal":"{sealed}"'.encode()))
    with pytest.raises(StoreError, match="crc32.*expected one of xxh3_128, sha256"):
        read(path)
