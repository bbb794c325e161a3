"""Where the features of a target's weights are stored, by the registry's deployment.yaml. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from draftworks.config.features import ObjectFeaturesSpec
from draftworks.config.run_files import StoreSpec, TargetFiles
from draftworks.errors import StoreError
from draftworks.storage.identity import DIGEST_LENGTH
from draftworks.storage.object_access import parse_object_url
from draftworks.targets.registry import Registry

_WEIGHTS = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")


def locate_feature_store(registry: Registry, files: TargetFiles) -> StoreSpec:
    """Return the feature store of a target's weights, shared by all runs, strategies and targets of these weights.

    Raises:
        StoreError: nothing is stored for these weights, but a version of before 22 November 2026 stored features under the
            target's name: they would be captured again without a word.
    """
    spec = describe_store(registry, files.digest)
    if spec.objects is None and not spec.root.exists():
        _refuse_named_store(spec.root, files.name)
    return spec


def _refuse_named_store(root: Path, name: str) -> None:
    """Raise StoreError if a store below a target's name is no store of a digest yet; versions of before linked it."""
    named = root.parent / name
    holds = any(any((named / folder).glob(files)) for folder, files in (("shards", "*"), ("samples", "*/*")))
    if holds and not any(path.is_symlink() and path.resolve() == named.resolve() for path in root.parent.iterdir()):
        raise StoreError(
            f"{named}: features under a target's name, as versions of before 22 November 2026 stored them; expected them "
            f"under the digest of its weights, {root.name}. If they are of these weights: ln -s {name} {root}; otherwise "
            "move the folder away"
        )


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
