"""The one partition dimension: target models, a partition for each file in registry/targets/."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import dagster as dg

from draftworks.targets.registry import Registry


def target_partitions(registry: Registry) -> dg.StaticPartitionsDefinition:
    """Only file names are read here: an entry with an error is a partition whose first step says what is wrong."""
    return dg.StaticPartitionsDefinition(registry.list_targets())


def partitioned(assets: list[dg.AssetsDefinition], targets: dg.PartitionsDefinition) -> list[dg.AssetsDefinition]:
    """The same assets, each partitioned by target, and so are the checks that they run themselves."""
    mapped = dg.map_asset_specs(lambda spec: spec.replace_attributes(partitions_def=targets), assets)
    return partitioned_checks(mapped, targets)


def partitioned_checks(
    made: Iterable[dg.AssetsDefinition], targets: dg.PartitionsDefinition
) -> list[dg.AssetsDefinition]:
    """The same definitions, the checks of each partitioned by target: otherwise the last target's result is everybody's.

    Dagster calls partitions of checks a preview, once for each of them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [_with_checks_of(each, targets) for each in made]


def _with_checks_of(made: dg.AssetsDefinition, targets: dg.PartitionsDefinition) -> dg.AssetsDefinition:
    """Dagster has `map_asset_specs`, and nothing like it for checks: this is how its own `with_attributes` replaces them."""
    specs = {name: _of(spec, targets) for name, spec in made.node_check_specs_by_output_name.items()}
    if not specs:
        return made
    return type(made).dagster_internal_init(**{**made.get_attributes_dict(), "check_specs_by_output_name": specs})


def _of(spec: dg.AssetCheckSpec, targets: dg.PartitionsDefinition) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        spec.name,
        asset=spec.asset_key,
        description=spec.description,
        additional_deps=spec.additional_deps,
        blocking=spec.blocking,
        metadata=spec.metadata,
        automation_condition=spec.automation_condition,
        partitions_def=targets,
    )
