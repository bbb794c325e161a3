"""A Mooncake store under the contract of feature stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from store_harness import StoreHarness
from torch import Tensor

from draftworks.features.mooncake_objects import HEAD_BYTES
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient, Region


@dataclass
class MooncakeHarness(StoreHarness):
    address_file: Path
    shared_client: MooncakeClient | None = None
    start_method = "spawn"
    defers = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared_client": None}

    def client(self) -> MooncakeClient:
        """Return this process's connection."""
        if self.shared_client is None:
            self.shared_client = MooncakeClient(MooncakeAddress.read(self.address_file))
        return self.shared_client

    def open(self, max_hold_age_s: float = 3600.0) -> MooncakeFeatureStore:
        return MooncakeFeatureStore(
            self.address_file, 0.0, max_hold_age_s=max_hold_age_s, connect=lambda _: self.client()
        )

    def alter(self, stored: Tensor) -> None:
        key, content = self._find(stored)
        content[HEAD_BYTES] ^= 0x10
        assert self.client().put_small({key: bytes(content)}) == [0]

    def truncate(self, stored: Tensor) -> None:
        key, content = self._find(stored)
        assert self.client().put_small({key: bytes(content[:-1])}) == [0]

    def stored_bytes(self) -> int:
        return sum(self.client().sizes(self.keys()))

    def leftovers(self) -> list[str]:
        return []

    def keys(self) -> list[str]:
        client = self.client()
        return [key for key in client.list_keys(client.read_owner().metrics) if is_object(key)]

    def clear(self) -> None:
        """Empty Mooncake."""
        self.client().remove(self.keys(), force=True)

    def _find(self, stored: Tensor) -> tuple[str, bytearray]:
        wanted = stored.contiguous().view(torch.uint8).numpy().tobytes()
        for key in self.keys():
            content = _read(self.client(), key)
            if content.endswith(wanted):
                return key, content
        raise AssertionError("no object has the tensor")


def is_object(key: str) -> bool:
    """Whether a key is not its owner's."""
    return not key.endswith("/owner") and "/alive/" not in key


def _read(client: MooncakeClient, key: str) -> bytearray:
    buffer = torch.zeros(client.sizes([key])[0], dtype=torch.uint8)
    region = Region(buffer.data_ptr(), buffer.nbytes, buffer)
    with client.registered(region):
        assert client.read([key], [region]) == [buffer.nbytes]
    return bytearray(buffer.numpy().tobytes())
