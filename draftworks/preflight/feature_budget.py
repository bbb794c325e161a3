"""Warnings of features that will not fit: what a plan estimates beside `capture.budget_gb` and the free disk. Torch-free.

No errors: how many tokens answers have is known only once they are made.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import DraftworksError
from draftworks.planning.estimates import NOTHING, Estimate
from draftworks.planning.plan import GB, estimate_new_bytes
from draftworks.planning.subject import PlanSubject
from draftworks.preflight.findings import Findings
from draftworks.preflight.streams import find_existing
from draftworks.targets.registry import Registry


def check_feature_budget(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn where a set of features is likely to need more than the budget, or all of them more than the disk has."""
    if not target.strategies:
        return  # no draft, no features
    try:
        found = estimate_new_bytes(PlanSubject.of(target.name, registry))
    except (DraftworksError, OSError):
        return  # what a plan cannot be made of is said by other checks
    where = f"target {target.name}: capture.budget_gb"
    budget = target.capture.budget_gb
    for asset, nbytes in found.items():
        needed = nbytes * (1 / GB)
        if needed.value > budget:
            findings.warning(
                f"{where}: {asset} will take about {_format(needed)}, and more than {budget:g} GB is refused. Raise it, or lower "
                "data.max_conversations or max_length"
            )
    _check_disk(target, registry, sum(found.values(), NOTHING), findings)


def _check_disk(target: TargetSpec, registry: Registry, needed: Estimate, findings: Findings) -> None:
    features = registry.load_deployment().features
    if features.kind == "s3":
        return
    root = registry.resolve_var_folder() if features.root is None else registry.resolve_path(features.root)
    existing: Path = find_existing(root)
    free = shutil.disk_usage(existing).free
    if needed.value > free:
        findings.warning(
            f"target {target.name}: its features will take about {_format(needed * (1 / GB))}, and the disk of {existing} has "
            f"{free / GB:,.1f} GB left: make room, name another (features.root), or let them stream"
        )


def _format(size: Estimate) -> str:
    return f"{size.value:.3g} GB ({size.low:.3g} to {size.high:.3g})"
