"""Addresses of Mooncake stores: what cannot be one is refused before anybody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.errors import ConfigError, StoreError
from draftworks.mooncake.address import MooncakeAddress, OwnerRecord


@pytest.mark.parametrize("master", ["host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:a", ""])
def test_a_master_is_a_host_and_a_port_that_exists(master: str):
    with pytest.raises(ConfigError, match="expected host:port"):
        MooncakeAddress(master, "toys")


@pytest.mark.parametrize("master", ["host:1", "host:65535", "[::1]:50051", "10.0.0.1:50051"])
def test_an_address_comes_back_from_its_file(master: str, tmp_path: Path):
    address = MooncakeAddress(master, "toys", host="10.0.0.2", timeout_s=2.5)
    (tmp_path / "address.json").write_text(address.to_json())
    assert MooncakeAddress.read(tmp_path / "address.json") == address


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"master": "host:1"}', '{"master": "host:1", "store_id": "a", "b": 1}']
)
def test_a_file_that_is_no_address_is_told(text: str, tmp_path: Path):
    (tmp_path / "address.json").write_text(text)
    with pytest.raises(StoreError, match="is no address of a Mooncake service"):
        MooncakeAddress.read(tmp_path / "address.json")
    with pytest.raises(StoreError, match="found none. Start it"):
        MooncakeAddress.read(tmp_path / "none.json")


def test_a_record_of_the_owner_comes_back_and_one_of_another_schema_is_refused():
    record = OwnerRecord("i", 1 << 24, 60.0, "127.0.0.1:9003", "host", 7)
    assert OwnerRecord.from_bytes(record.to_bytes(), "here") == record
    with pytest.raises(StoreError, match="expected 1. Use one version"):
        OwnerRecord.from_bytes(record.to_bytes().replace(b'"schema": 1', b'"schema": 2'), "here")
