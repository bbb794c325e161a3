"""A Mooncake store under the contract of feature stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from store_harness import StoreHarness
from torch import Tensor

from draftworks.features.contracts import FeatureStore
from draftworks.features.keyed_mooncake import KeyedMooncakeStore
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient, Region


@dataclass
class MooncakeHarness(StoreHarness):
    address: MooncakeAddress
    keyed: bool = False
    consume_once: bool = False
    sole_reader: bool = True
    shared_client: MooncakeClient | None = None
    opened: list[KeyedMooncakeStore | MooncakeFeatureStore] = field(default_factory=list)
    start_method = "spawn"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": [], "shared_client": None}

    def client(self) -> MooncakeClient:
        """Return this process's connection."""
        if self.shared_client is None:
            self.shared_client = MooncakeClient(self.address)
        return self.shared_client

    def open(self, max_hold_age_s: float = 3600.0) -> FeatureStore:
        words: dict[str, Any] = {
            "client": self.client(),
            "sole_reader": self.sole_reader,
            "max_hold_age_s": max_hold_age_s,
            "orphan_age_s": 0.0,
        }
        store = (
            KeyedMooncakeStore(self.address, **words)
            if self.keyed
            else MooncakeFeatureStore(self.address, retain_on_release=not self.consume_once, **words)
        )
        self.opened.append(store)
        return store

    def alter(self, stored: Tensor) -> None:
        altered = bytearray(_content(stored))
        altered[0] ^= 0x10
        self.replace(stored, bytes(altered))

    def truncate(self, stored: Tensor) -> None:
        self.replace(stored, _content(stored)[:-1])

    def replace(self, stored: Tensor, content: bytes) -> None:
        client = self.client()
        for key in self.keys():
            if _read(client, key) == _content(stored):
                assert client.put_small({key: content}) == [0]
                break
        else:
            raise AssertionError("no object has the tensor")

    def stored_bytes(self) -> int:
        client = self.client()
        sizes = [client.size(key) for key in self.keys()]
        return sum(sizes)

    def leftovers(self) -> list[str]:
        """Tensors of generations without a head, and heads without tensors."""
        keys = self.keys(heads=True)
        entries = [key.split("/")[1] for key in keys if not key.endswith("/head")]
        heads = {key.split("/")[1] for key in keys if key.endswith("/head")}
        generations = {tuple(key.split("/")[1:3]) for key in keys if not key.endswith("/head")}
        return sorted({*entries} ^ heads) + sorted({entry for entry, _ in generations if len(generations) > len(heads)})

    def keys(self, heads: bool = False) -> list[str]:
        client = self.client()
        keys = client.list_keys(client.read_owner().metrics)
        return [key for key in keys if "/g" in key or (heads and key.endswith("/head"))]

    def clear(self) -> None:
        """Close the stores that were opened, and empty Mooncake."""
        for store in self.opened:
            store.close()
        self.client().remove(self.keys(heads=True), force=True)


def _content(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _read(client: MooncakeClient, key: str) -> bytes:
    buffer = torch.zeros(client.size(key), dtype=torch.uint8)
    region = Region(buffer.data_ptr(), buffer.nbytes, buffer)
    with client.registered(region):
        assert client.read([key], [region]) == [buffer.nbytes]
    return buffer.numpy().tobytes()
