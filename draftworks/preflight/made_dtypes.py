"""Check that the dtype which this machine chooses is the one that results were made in. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from draftworks.config.registry_files import TargetSpec
from draftworks.preflight.findings import Findings
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.asset_names import TRAINING_FEATURES, of_strategy
from draftworks.storage.data_records import FeaturesIdentity
from draftworks.storage.records import DraftIdentity
from draftworks.targets.registry import Registry

_KEY = "compute_dtype"


def check_made_dtypes(target: TargetSpec, registry: Registry, artifacts: ArtifactStore, findings: Findings) -> None:
    """Warn of results that would be made again since another machine, or another version, chose another dtype."""
    for line in _list_differences(registry.read_target(target.name), target, artifacts):
        findings.warning(f"target {target.name}: {line}")


def _list_differences(written: TargetSpec, target: TargetSpec, artifacts: ArtifactStore) -> Iterator[str]:
    features = None if _KEY in written.capture.model_fields_set else artifacts.find(TRAINING_FEATURES, target.name)
    if features is not None:
        made = (FeaturesIdentity.of(features).capture or {}).get(_KEY)
        yield from _describe("capture", "features", made, target.capture.compute_dtype)
    for name, entry in target.strategies.items():
        if _KEY in written.strategies[name].training.model_fields_set:
            continue
        draft = artifacts.find(of_strategy(name).draft, target.name)
        if draft is not None:
            made = (DraftIdentity.of(draft).training or {}).get(_KEY)
            yield from _describe(f"strategies.{name}.training", "its draft", made, entry.training.compute_dtype)


def _describe(key: str, what: str, made: object, chosen: str) -> Iterator[str]:
    if made not in (None, chosen):
        yield (
            f"{key}.{_KEY}: {what} had {made}, the default here is {chosen}: a run makes it again, unless you set {_KEY} to {made}"
        )
