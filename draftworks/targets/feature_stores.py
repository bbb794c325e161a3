"""Where the features of a target's weights are stored, by the registry's deployment.yaml. Torch-free."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.features import FeaturesSpec
from draftworks.config.object_storage import ObjectFeaturesSpec, ObjectStorageSpec
from draftworks.config.run_files import StoreSpec, TargetFiles
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.legacy_stores import find_store
from draftworks.storage.object_access import parse_object_url
from draftworks.targets.registry import Registry


def locate_feature_store(registry: Registry, artifacts: ArtifactStore, files: TargetFiles) -> StoreSpec:
    """Return the feature store of a target's weights, shared by all runs, strategies and targets of these weights.

    Raises:
        StoreError: features that an earlier version stored under the target's name cannot be moved there.
    """
    deployment, var = registry.load_deployment(), registry.resolve_var_folder()
    features = deployment.features
    if features.url is not None:
        return _describe_objects(registry, var, features, features.url, deployment.object_storage, files)
    root = var / "feature_store" if features.root is None else registry.resolve_path(features.root)
    return StoreSpec(kind=features.kind, root=find_store(root, files.digest, files.name, artifacts))


def _describe_objects(
    registry: Registry, var: Path, features: FeaturesSpec, url: str, storage: ObjectStorageSpec, files: TargetFiles
) -> StoreSpec:
    notes = var / "object_store_notes" if features.root is None else registry.resolve_path(features.root)
    cache = var / "feature_cache" if features.cache is None else registry.resolve_path(features.cache)
    objects = ObjectFeaturesSpec(
        url=f"{url.rstrip('/')}/{files.digest}",
        access=storage.select(parse_object_url(url).bucket),
        cache=cache,
        cache_gb=features.cache_gb,
        read_ahead_mb=features.read_ahead_mb,
        requests=features.requests,
    )
    return StoreSpec(kind=features.kind, root=notes / files.digest, objects=objects)
