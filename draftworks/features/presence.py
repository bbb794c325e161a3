"""Whether what a feature set refers to is still there."""

from __future__ import annotations

import logging
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set

log = logging.getLogger(__name__)


def holds_feature_set(store: Path, feature_set: Path) -> bool:
    """Whether the store at `store` has every feature that the set in the folder `feature_set` names.

    A set that is damaged or of another schema holds nothing: it is made again, from features that are still stored.

    Raises:
        StoreError: a shard of the store is damaged.
    """
    try:
        refs = read_feature_set(feature_set).refs
    except StoreError as error:
        log.warning("%s", error)
        return False
    opened = LocalFeatureStore(store)
    try:
        return not opened.missing({key for ref in refs for key in ref.feature_keys.values()})
    finally:
        opened.close()
