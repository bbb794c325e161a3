"""A feature set with the store that it is read from."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.features.contracts import FeatureStore
from draftworks.features.manifest import FeatureSetManifest


@dataclass(frozen=True)
class FeatureSource:
    """The samples of a feature set, and the store that has their features."""

    manifest: FeatureSetManifest
    store: FeatureStore
