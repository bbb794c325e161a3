"""The data that a target's drafts are trained on: its data set, or its mix with weights. Torch-free; no row is parsed."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.data.slice_weights import SlicePlan, read_plan
from draftworks.data.sources import digest_dataset, find_dataset_files
from draftworks.errors import ConfigError
from draftworks.storage.identity import FileDigests, digest
from draftworks.targets.registry import Registry


def load_training_datasets(target: TargetSpec, registry: Registry) -> list[DatasetSpec]:
    """Return the data sets that are trained on, the target's own first."""
    return [registry.load_dataset(name) for name in target.training_datasets]


def find_training_files(target: TargetSpec, registry: Registry) -> list[Path]:
    """Return the files of all data sets that are trained on."""
    return [
        path for spec in load_training_datasets(target, registry) for path in find_dataset_files(spec, registry.root)
    ]


def load_slice_plan(target: TargetSpec, registry: Registry) -> SlicePlan | None:
    """Return the weights of a target's mix; None where it has none.

    Raises:
        ConfigError: the file is not there yet, or is no plan.
    """
    if target.mix is None or target.mix.weights is None:
        return None
    path = registry.resolve_path(target.mix.weights)
    if not path.exists():
        strategy = next(iter(target.strategies), "STRATEGY")
        eval_set = f" --eval-set {target.evals[0]}" if target.evals else ""
        raise ConfigError(
            f"target {target.name}: mix.weights: expected the file {path}, which is not there. Write it with: draftworks "
            f"slices {target.name} {strategy}{eval_set} --save {path}; or take mix.weights out of the entry until then"
        )
    return read_plan(path)


def digest_training_data(target: TargetSpec, registry: Registry, digests: FileDigests) -> str:
    """Return the content digest of what is trained on: that of the data set, or of the mix with names and weights."""
    specs, plan = load_training_datasets(target, registry), load_slice_plan(target, registry)
    versions = [digest_dataset(spec, registry.root, digests) for spec in specs]
    if target.mix is None:
        return versions[0]
    named = [[spec.name, version] for spec, version in zip(specs, versions)]
    return digest(["mix", named, None if plan is None else plan.identity])
