"""The one partition dimension: target models, a partition for each file in registry/targets/."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import dagster as dg

from draftworks.targets.registry import Registry


def make_target_partitions(registry: Registry) -> dg.StaticPartitionsDefinition:
    """Return a partition for each file name. An entry with an error is a partition too, and its first step reports
    the error."""
    return dg.StaticPartitionsDefinition(registry.list_targets())


def partition_assets(assets: list[dg.AssetsDefinition], targets: dg.PartitionsDefinition) -> list[dg.AssetsDefinition]:
    """Return the assets with their own checks, partitioned by target."""
    mapped = dg.map_asset_specs(lambda spec: spec.replace_attributes(partitions_def=targets), assets)
    return partition_checks(mapped, targets)


def partition_checks(
    made: Iterable[dg.AssetsDefinition], targets: dg.PartitionsDefinition
) -> list[dg.AssetsDefinition]:
    """Return the definitions with their checks partitioned by target; otherwise all targets share the newest check
    result.

    Dagster warns once for each check that partitions of checks are a preview.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [_partition_checks_of(each, targets) for each in made]


def _partition_checks_of(made: dg.AssetsDefinition, targets: dg.PartitionsDefinition) -> dg.AssetsDefinition:
    """Return the definition with its checks partitioned by target, by the way in which Dagster's `with_attributes` does.

    Dagster has `map_asset_specs`, but no counterpart for checks.
    """
    specs = {name: _partition_check(spec, targets) for name, spec in made.node_check_specs_by_output_name.items()}
    if not specs:
        return made
    return type(made).dagster_internal_init(**{**made.get_attributes_dict(), "check_specs_by_output_name": specs})


def _partition_check(spec: dg.AssetCheckSpec, targets: dg.PartitionsDefinition) -> dg.AssetCheckSpec:
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
