"""Where the features of a target's weights are stored, by the registry's deployment.yaml. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from draftworks.config.features import ObjectFeaturesSpec
from draftworks.config.run_files import StoreSpec, TargetFiles
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import DIGEST_LENGTH
from draftworks.storage.legacy_stores import find_store
from draftworks.storage.object_access import parse_object_url
from draftworks.targets.registry import Registry

_WEIGHTS = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")


def locate_feature_store(registry: Registry, artifacts: ArtifactStore, files: TargetFiles) -> StoreSpec:
    """Return the feature store of a target's weights, shared by all runs, strategies and targets of these weights.

    Raises:
        StoreError: features that an earlier version stored under the target's name cannot be moved there.
    """
    spec = describe_store(registry, files.digest)
    if spec.objects is None:
        find_store(spec.root.parent, files.digest, files.name, artifacts)
    return spec


def locate_store_folder(registry: Registry) -> Path:
    """Return the folder with a store, or with notes of a store in object storage, for the weights of each target."""
    features = registry.load_deployment().features
    if features.root is not None:
        return registry.resolve_path(features.root)
    return registry.resolve_var_folder() / ("feature_store" if features.url is None else "object_store_notes")


def describe_store(registry: Registry, weights: str) -> StoreSpec:
    """Return the feature store of a target's weights.

    Args:
        weights: their digest.
    """
    deployment, root = registry.load_deployment(), locate_store_folder(registry) / weights
    features = deployment.features
    if features.url is None:
        return StoreSpec(kind=features.kind, root=root)
    cache = registry.resolve_var_folder() / "feature_cache"
    objects = ObjectFeaturesSpec(
        url=f"{features.url.rstrip('/')}/{weights}",
        access=deployment.object_storage.select(parse_object_url(features.url).bucket),
        cache=cache if features.cache is None else registry.resolve_path(features.cache),
        cache_gb=features.cache_gb,
        read_ahead_mb=features.read_ahead_mb,
        requests=features.requests,
    )
    return StoreSpec(kind=features.kind, root=root, objects=objects)


def list_stores(registry: Registry) -> list[StoreSpec]:
    """Return every feature store that exists, by the digest of its weights.

    Links to stores that an earlier version kept under a target's name count; the names themselves do not.
    """
    try:
        names = sorted(path.name for path in locate_store_folder(registry).iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    return [describe_store(registry, name) for name in names if _WEIGHTS.fullmatch(name)]
