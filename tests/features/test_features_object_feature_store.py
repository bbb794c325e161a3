"""A feature store in object storage keeps the contract of all stores, and reads no more than it has to."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_toys import ObjectHarness
from store_keyed_contract import PruningContract


class TestObjectFeatureStore(PruningContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ObjectHarness:
        return ObjectHarness(tmp_path / "store")
