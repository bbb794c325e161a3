"""Which targets are measured on which eval set, so that a new set concerns those alone.

Assets exist once for all targets. If a report of each target depended on every eval set, Dagster would mark all reports
as "Unsynced" when one target lists a new set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import dagster as dg

from draftworks.storage.asset_names import EvalSetAssets, of_eval_set
from draftworks.targets.registry import Registry

EvalUsers = Mapping[str, Sequence[str]]
"""Targets by the named eval set that they list."""


def find_eval_users(registry: Registry, evals: Sequence[str]) -> EvalUsers:
    """Return the targets whose entry mentions an eval set, by the set. Entries are not parsed; a mention too many does no
    harm."""
    patterns = {name: re.compile(rb"(?<![\w.-])" + re.escape(name.encode()) + rb"(?![\w.-])") for name in evals}
    targets = registry.list_targets()
    return {
        name: [target for target in targets if registry.find_in_target_file(target, pattern)]
        for name, pattern in patterns.items()
    }


def depend_on_eval_sets(evals: EvalUsers, select: Callable[[EvalSetAssets], Sequence[str]]) -> Iterator[dg.AssetDep]:
    """Yield dependencies on assets of each eval set, only for the targets that are measured on it."""
    for name, targets in evals.items():
        mapping = dg.StaticPartitionMapping({target: target for target in targets})
        yield from (dg.AssetDep(asset, partition_mapping=mapping) for asset in select(of_eval_set(name)))
