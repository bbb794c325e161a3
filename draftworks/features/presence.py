"""Whether the features that a feature set refers to still exist."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store

if TYPE_CHECKING:
    from draftworks.config.run_files import StoreSpec

log = logging.getLogger(__name__)


def holds_feature_set(store: StoreSpec, feature_set: Path) -> bool:
    """Whether a store has every feature that the set in the folder `feature_set` names.

    False for a set that is damaged or of another schema: it is written again from features that are still stored.

    Raises:
        StoreError: the store cannot be opened, or a shard of it is damaged.
    """
    try:
        refs = read_feature_set(feature_set).refs
    except StoreError as error:
        log.warning("%s", error)
        return False
    opened = open_store(store)
    try:
        return not opened.find_missing({key for ref in refs for key in ref.feature_keys.values()})
    finally:
        opened.close()
