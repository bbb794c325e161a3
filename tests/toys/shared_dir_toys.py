"""A sample put into a shared folder, and where it went."""

from __future__ import annotations

import re
from pathlib import Path

from features_toys import toy_ref, toy_tensors

from draftworks.features.contracts import SampleRef
from draftworks.features.shared_dir_store import SharedDirFeatureStore


def put(store: SharedDirFeatureStore, index: int, plus: float = 0.0) -> SampleRef:
    ref = toy_ref(index)
    return store.put(ref, {name: tensor + plus for name, tensor in toy_tensors(ref).items()})


def file_of(root: Path) -> Path:
    (path,) = (root / "samples").glob("*/*")
    return path


def generation(ref: SampleRef) -> int:
    return int(re.search(r"\.g(\d+)\.", ref.feature_keys["last"])[1])
