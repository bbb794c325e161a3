"""A feature set counts as there only if it can be read and the store has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from features_toys import filled_store

from draftworks.config.run_files import StoreSpec
from draftworks.features.manifest import MANIFEST, REFS, FeatureSetIdentity, write_feature_set
from draftworks.features.open_store import holds_feature_set


@pytest.fixture
def written(tmp_path: Path) -> Path:
    store, refs = filled_store(tmp_path / "store", 4)
    write_feature_set(tmp_path / "set", refs, FeatureSetIdentity(target="abc"), ("hf2", "last"), store.uri)
    return tmp_path


def test_whole_set_is_held_until_its_features_are_gone(written: Path):
    assert holds_feature_set(StoreSpec(root=written / "store"), written / "set")
    for shard in (written / "store" / "shards").iterdir():
        shard.unlink()
    assert not holds_feature_set(StoreSpec(root=written / "store"), written / "set")


@pytest.mark.parametrize(("name", "old", "new"), [(MANIFEST, "features.3", "features.2"), (REFS, "s1", "s9")])
def test_set_of_another_schema_or_damaged_is_to_be_made_again(written: Path, name: str, old: str, new: str):
    path = written / "set" / name
    path.write_text(path.read_text().replace(old, new, 1))
    assert not holds_feature_set(StoreSpec(root=written / "store"), written / "set")
