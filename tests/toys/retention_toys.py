"""A fleet's results, without the work of making them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from features_toys import toy_ref, toy_tensors

from draftworks.config.operations import RetentionSpec
from draftworks.config.run_files import StoreSpec
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import FeatureSetIdentity, write_feature_set
from draftworks.retention.removable import Place
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult

WEIGHTS = "0123456789abcdef"


def make_place(var: Path, targets: Iterable[str] = ("a",), **settings: Any) -> Place:
    """Return a place whose features are those of `WEIGHTS`, in which nothing is too young to go."""
    store = StoreSpec(kind="local", root=var / "feature_store" / WEIGHTS)
    stores = (store,) if store.root.exists() else ()
    chosen = RetentionSpec(**{"keep_days": 0, "runs_days": 0, **settings})
    return Place(var, chosen, frozenset(targets), stores, now=time.time() + 60)


def make_result(var: Path, asset: str, target: str = "a", content: str = "", **identity: Any) -> Artifact:
    """Publish a result, which becomes the current one; its data version is `content`, or new."""

    def build(folder: Path) -> BuildResult:
        (folder / "file").write_text("x" * 1000)
        return BuildResult(content or os.urandom(8).hex())

    return ArtifactStore(var).obtain(asset, target, identity, build)


def make_features(var: Path, samples: Iterable[int], tokens: str, target: str = "a") -> Artifact:
    """Publish a set of training features, each sample in a shard of its own."""
    store = LocalFeatureStore(var / "feature_store" / WEIGHTS)
    refs = []
    for index in samples:
        refs.append(store.put(toy_ref(index), toy_tensors(toy_ref(index))))
        store.flush()
    store.close()
    identity = FeatureSetIdentity(WEIGHTS, "hf-float32", 1, "float32", True)

    def build(folder: Path) -> BuildResult:
        write_feature_set(folder, refs, identity, tuple(refs[0].feature_keys), store.uri)
        return BuildResult(os.urandom(8).hex(), {"captured_bytes": 1000, "seconds": 1.0})

    return ArtifactStore(var).obtain("training_features", target, {"tokens": tokens, "target": WEIGHTS}, build)


def list_stored(var: Path) -> set[str]:
    """Return the keys of the stored features."""
    store = LocalFeatureStore(var / "feature_store" / WEIGHTS)
    keys = {key for index in range(20) for key in toy_ref(index).feature_keys.values()}
    return keys - set(store.find_missing(sorted(keys)))


def keys_of(*samples: int) -> set[str]:
    return {key for index in samples for key in toy_ref(index).feature_keys.values()}
