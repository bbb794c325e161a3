"""Stores that versions of before kept under a target's name are opened where a link leads to them, otherwise refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.config.run_files import TargetFiles
from draftworks.errors import StoreError
from draftworks.targets.feature_stores import list_stores, locate_feature_store
from draftworks.targets.registry import Registry

WEIGHTS, OTHERS = "0" * 16, "1" * 16


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "deployment.yaml").write_text("{}\n")
    named = tmp_path / "var" / "feature_store" / "tiny" / "shards"
    named.mkdir(parents=True)
    (named / "1.safetensors").touch()
    return Registry(tmp_path / "registry")


def files_of(tiny_target: TargetFiles, weights: str) -> TargetFiles:
    return tiny_target.model_copy(update={"name": "tiny", "digest": weights})


def test_a_store_under_a_name_is_refused_until_the_link_of_the_message_is_made(registry, tiny_target):
    root = registry.resolve_var_folder() / "feature_store"
    with pytest.raises(StoreError, match=rf"ln -s tiny {root / WEIGHTS}"):
        locate_feature_store(registry, files_of(tiny_target, WEIGHTS))
    (root / WEIGHTS).symlink_to("tiny")
    assert (locate_feature_store(registry, files_of(tiny_target, WEIGHTS)).root / "shards" / "1.safetensors").exists()
    assert [store.root for store in list_stores(registry)] == [root / WEIGHTS]


def test_weights_that_come_later_get_a_store_of_their_own_beside_a_linked_one(registry, tiny_target):
    root = registry.resolve_var_folder() / "feature_store"
    (root / WEIGHTS).symlink_to("tiny")
    assert locate_feature_store(registry, files_of(tiny_target, OTHERS)).root == root / OTHERS
