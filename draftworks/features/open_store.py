"""Opens the feature store that a run file names; the only module that knows all kinds of stores."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.feature_cache import FeatureCache
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.features.object_feature_store import ObjectFeatureStore
from draftworks.mooncake.address import ADDRESS_FILE
from draftworks.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from draftworks.config.run_files import StoreSpec


SHARD_BYTES = 256 << 20


def open_store(spec: StoreSpec, shard_bytes: int = SHARD_BYTES, keep_tensors: bool = False) -> KeyedFeatureStore:
    """Open, or create, the store of a kind at a place.

    Args:
        shard_bytes: size at which a local store publishes a shard; a shared one has none.
        keep_tensors: tensors that are put are not changed afterwards, so that a local store need not copy them.

    Raises:
        ConfigError: the kind needs a library that is not installed, or keys that the environment lacks.
        StoreError: the place cannot be a store, or is a shared one that is not mounted on this machine.
    """
    with _opening(spec):
        if spec.kind == "local":
            return LocalFeatureStore(spec.root, shard_bytes=shard_bytes, keep_tensors=keep_tensors)
        if spec.kind == "s3":
            return _open_objects(spec, shard_bytes, keep_tensors)
        if spec.kind == "mooncake":
            return MooncakeFeatureStore(spec.root / ADDRESS_FILE, spec.timeout_s, spec.put_timeout_s)
        if not spec.root.parent.is_dir():
            # Creating it would make a local folder with the name of the shared one.
            raise StoreError(f"{spec.root.parent}: expected the shared folder, found none. Mount it on this machine")
        return KeyedSharedDirStore(spec.root)


def open_store_to_write(spec: StoreSpec, shard_bytes: int = SHARD_BYTES) -> KeyedFeatureStore:
    """As `open_store`; raises StoreError also if it is not writable, before anything is computed for it.

    Tensors that are put must not be changed afterwards.
    """
    store = open_store(spec, shard_bytes, keep_tensors=True)
    if spec.kind == "mooncake":
        return store
    if isinstance(store, ObjectFeatureStore):
        store.require_writable()
        return store
    with _opening(spec), tempfile.TemporaryFile(dir=spec.root):
        return store


def _open_objects(spec: StoreSpec, shard_bytes: int, keep_tensors: bool) -> ObjectFeatureStore:
    assert spec.objects is not None, "checked by the spec"
    spec.root.mkdir(parents=True, exist_ok=True)
    found = spec.objects
    cache = None
    if found.cache is not None and found.cache_gb > 0:
        found.cache.mkdir(parents=True, exist_ok=True)
        cache = FeatureCache(found.cache, round(found.cache_gb * 1e9))
    return ObjectFeatureStore(
        ObjectStore.open(found.url, found.access),
        cache,
        shard_bytes=shard_bytes,
        read_ahead_bytes=found.read_ahead_mb << 20,
        requests=found.requests,
        keep_tensors=keep_tensors,
    )


@contextmanager
def _opening(spec: StoreSpec) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"feature store {spec.root} ({spec.kind}): expected a folder that this user may write to, found: {error}. "
            f"Correct its permissions, or name another one as features.root in registry/deployment.yaml"
        ) from error


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
