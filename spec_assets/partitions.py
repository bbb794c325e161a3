"""The one partition dimension: target models, a partition for each file in registry/targets/."""

from __future__ import annotations

import dagster as dg

from draftworks.registry import Registry


def target_partitions(registry: Registry) -> dg.StaticPartitionsDefinition:
    """Only file names are read here: an entry with an error is a partition whose first step says what is wrong."""
    return dg.StaticPartitionsDefinition(registry.target_names())


def partitioned(assets: list[dg.AssetsDefinition], targets: dg.PartitionsDefinition) -> list[dg.AssetsDefinition]:
    """The same assets, each partitioned by target."""
    return list(dg.map_asset_specs(lambda spec: spec.replace_attributes(partitions_def=targets), assets))
