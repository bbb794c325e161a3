"""Every feature store keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from features_toys import ToyTokens, toy_ref
from store_contract import WritingContract
from store_harness import FileHarness
from store_keyed_contract import PruningContract

from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.wrapped_store import JoinedStore

TOKENS = ToyTokens([toy_ref(index) for index in range(500)])


def open_local(root: Path, max_hold_age_s: float) -> LocalFeatureStore:
    return LocalFeatureStore(root, max_hold_age_s=max_hold_age_s)


def open_keyed_shared(root: Path, max_hold_age_s: float) -> KeyedSharedDirStore:
    return KeyedSharedDirStore(root, max_hold_age_s=max_hold_age_s, staging_age_s=0.0)


class TestLocalFeatureStore(PruningContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FileHarness:
        return FileHarness(tmp_path, open_local)


class TestKeyedSharedDirStore(PruningContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FileHarness:
        return FileHarness(tmp_path, open_keyed_shared, defers=False)


class TestJoinedStore(WritingContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FileHarness:
        def joined(root: Path, max_hold_age_s: float) -> JoinedStore:
            return JoinedStore(open_keyed_shared(root, max_hold_age_s), TOKENS)

        adds = frozenset({"input_ids", "loss_mask"})
        return FileHarness(tmp_path, joined, one_row_per_token=True, adds=adds)
