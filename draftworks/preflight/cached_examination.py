"""The pre-flight examination at the start of every run, cached until one of its inputs changes. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.plausible_values import check_values
from draftworks.preflight.probe_reach import check_probe_reach
from draftworks.storage.atomic import cache_json
from draftworks.storage.identity import digest
from draftworks.storage.installed import read_version
from draftworks.targets.registry import Registry

TARGET_CHECKS = "target_checks"
"""Folder of cached findings, in `var`."""
REVISION = 5
"""Increased with each change that can alter the findings; cached ones of other revisions are ignored."""
_LIBRARIES = ("draftworks", "torch", "transformers")


def examine_before_run(
    target: TargetSpec, files: TargetFiles, registry: Registry, data: Mapping[str, str], cache_folder: Path | None
) -> tuple[Finding, ...]:
    """Return findings about a target's values, drafts and first data rows. Findings without an error are cached.

    Args:
        data: data version of every data set of the target and of its eval sets, by name.
        cache_folder: folder of cached findings, keyed by the content of entry, files and data; None caches nothing.
    """
    path = None if cache_folder is None else _locate_cached(target, files, registry, data, cache_folder)
    known = None if path is None else _read_cached(path)
    if known is not None:
        return known
    findings = Findings()
    check_values(target, findings)
    check_probe_reach(target, files, findings)
    from draftworks.preflight.drafts import check_drafts  # imports torch, so only without a cached result
    from draftworks.preflight.sample import check_sample

    check_drafts(target, files, findings)
    check_sample(target, files, registry, findings)
    if path is not None and not findings.errors:
        cache_json(path, [asdict(each) for each in findings.found])
    return tuple(findings.found)


def is_examined(
    target: TargetSpec, files: TargetFiles, registry: Registry, data: Mapping[str, str], cache_folder: Path
) -> bool:
    """Whether `examine_before_run` would only read cached findings."""
    return _read_cached(_locate_cached(target, files, registry, data, cache_folder)) is not None


def _locate_cached(
    target: TargetSpec, files: TargetFiles, registry: Registry, data: Mapping[str, str], cache_folder: Path
) -> Path:
    versions = [read_version(library) for library in _LIBRARIES]
    sets = {name: registry.load_dataset(name).model_dump(mode="json") for name in data}
    evals = {name: registry.load_eval_set(name).model_dump(mode="json") for name in target.evals}
    inputs = [
        target.model_dump(mode="json", exclude={"launcher"}),
        files.model_dump(mode="json"),
        sets,
        evals,
        dict(data),
    ]
    return cache_folder / f"{digest([REVISION, versions, inputs])}.json"


def _read_cached(path: Path) -> tuple[Finding, ...] | None:
    try:
        return tuple(Finding(**each) for each in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # absent or unreadable: the target is examined again
