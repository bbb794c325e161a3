"""Opens the feature store that a run file names; the only module that knows all kinds of stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.restarted_mooncake import RestartedMooncakeStore
from draftworks.mooncake.address import ADDRESS_FILE

if TYPE_CHECKING:
    from draftworks.config.run_files import StoreSpec  # imports YAML, which a serving engine's environment may lack

SHARD_BYTES = 256 << 20


def open_store(spec: StoreSpec, shard_bytes: int = SHARD_BYTES, keep_tensors: bool = False) -> KeyedFeatureStore:
    """Open, or create, the store of a kind at a place.

    Args:
        shard_bytes: size at which a local store publishes a shard; a shared one has none.
        keep_tensors: tensors that are put are not changed afterwards, so that a local store need not copy them.

    Raises:
        ConfigError: the kind is mooncake, and Mooncake is not installed.
        StoreError: the place cannot be a store, or is a shared one that is not mounted on this machine.
    """
    with _opening(spec):
        if spec.kind == "local":
            return LocalFeatureStore(spec.root, shard_bytes=shard_bytes, keep_tensors=keep_tensors)
        if spec.kind == "mooncake":
            return RestartedMooncakeStore(spec.root / ADDRESS_FILE, spec.timeout_s, spec.put_timeout_s)
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
    with _opening(spec), tempfile.TemporaryFile(dir=spec.root):
        return store


@contextmanager
def _opening(spec: StoreSpec) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"feature store {spec.root} ({spec.kind}): expected a folder that this user may write to, found: {error}. "
            f"Correct its permissions, or name another one as features.root in registry/deployment.yaml"
        ) from error
