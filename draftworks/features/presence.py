"""Whether what a feature set refers to is still there."""

from __future__ import annotations

from pathlib import Path

from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set


def holds_feature_set(store: Path, feature_set: Path) -> bool:
    """Whether the store at `store` has every feature that the set in the folder `feature_set` names.

    Raises:
        StoreError: the set or a shard of the store is damaged.
    """
    opened = LocalFeatureStore(store)
    try:
        keys = {key for ref in read_feature_set(feature_set).refs for key in ref.feature_keys.values()}
        return not opened.missing(keys)
    finally:
        opened.close()
