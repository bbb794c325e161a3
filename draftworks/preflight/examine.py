"""Pre-flight examination of a target: its entry, files and data, without loading its weights.

Torch-free to import: torch, transformers and pyarrow are imported only after the cheap checks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.sources import find_dataset_files
from draftworks.errors import DraftworksError
from draftworks.preflight.compatibility import UnmetRequirements, check_quantizer, find_unmet
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.machine import check_machine, check_placement
from draftworks.preflight.plausible_values import (
    check_coverage,
    check_decision,
    check_fp8_gate,
    check_least_prompts,
    check_made_dtypes,
    check_probe_reach,
    check_values,
)
from draftworks.preflight.services import check_feature_budget, check_request_logs, check_served_data
from draftworks.sglang.layers import list_sglang_remarks
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.files import cache_json
from draftworks.storage.identity import FileDigests, digest, read_version
from draftworks.targets.fitted_defaults import describe_fitted
from draftworks.targets.gguf_store import ensure_converted
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import digest_datasets
from draftworks.targets.weights import WEIGHT_CHECKS, check_target_weights

log = logging.getLogger(__name__)

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
        target.model_dump_json(exclude={"launcher"}),  # as text: a limit may be infinite
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


def examine_entry(
    name: str,
    registry: Registry,
    digests: FileDigests,
    var: Path | None = None,
    say: Callable[[str], None] = log.info,
) -> tuple[Finding, ...]:
    """Return all findings about a target of the registry. An invalid entry is a finding too, and does not raise.

    Args:
        var: folder of results, in which runs keep what they found out about files, drafts and data, by content; what is
            known there is not found out again. None keeps nothing.
        say: is given progress of what takes long: a GGUF file that is dequantised.
    """
    findings = Findings()
    target = None
    with findings.collect_errors():
        target = registry.load_target(name)
    if target is None:
        target = registry.salvage_target(name)
        if target is None:
            return tuple(findings.found)
        return _examine_loaded(target, registry, findings, digests, var, say)
    for line in describe_fitted(registry.read_target(name), target):
        findings.note(f"target {name}: {line}")
    if var is not None:
        check_made_dtypes(target, registry, ArtifactStore(var), findings)
    return _examine_loaded(target, registry, findings, digests, var, say)


def _examine_loaded(
    target: TargetSpec,
    registry: Registry,
    findings: Findings,
    digests: FileDigests,
    var: Path | None,
    say: Callable[[str], None],
) -> tuple[Finding, ...]:
    """Return the findings so far, with all about the files, data and drafts of an entry."""
    name, files = target.name, None
    try:
        ensure_converted(target, registry, digests, say)
        files = resolve_target(target, registry, digests)
    except DraftworksError as error:
        if target.is_hub and "cannot be reached" in str(error):
            findings.warning(f"{error}. Nothing of it was checked")
        else:
            findings.error(str(error))
    examine_target(target, files, registry, findings, digests, None if var is None else var / TARGET_CHECKS)
    check_feature_budget(target, registry, findings)
    if var is not None:
        check_coverage(target, ArtifactStore(var), findings)
    if files is not None:
        if var is not None:
            check_fp8_gate(ArtifactStore(var), target, files.digest, findings)
        with findings.collect_errors():
            weights = check_target_weights(files, target.capture.backend, None if var is None else var / WEIGHT_CHECKS)
            if weights.note is not None:
                findings.warning(f"target {name}: {weights.note}")
    return tuple(findings.found)


def examine_target(
    target: TargetSpec,
    files: TargetFiles | None,
    registry: Registry,
    findings: Findings,
    digests: FileDigests,
    cache_folder: Path | None,
) -> None:
    """Add all findings about a target.

    Args:
        files: None if the target could not be resolved; then only entry, machine and data files are checked.
        cache_folder: that of `examine_before_run`.
    """
    with findings.collect_errors():  # of the deployment
        check_machine(target, registry, findings)
        check_placement(target, registry, findings)
        check_decision(target, registry, findings)
        check_least_prompts(target, findings)
    data = _check_data(target, registry, findings, digests)
    unmet = UnmetRequirements()
    if files is not None:
        unmet = find_unmet(target, files, registry)
        for problem in unmet.problems:
            findings.error(problem)
        with findings.collect_errors():
            check_quantizer(target, files, registry, findings)
        with findings.collect_errors():
            for remark in list_sglang_remarks(target, files):
                findings.warning(remark)
    if files is not None and data is not None and not unmet.problems:
        findings.found += examine_before_run(target, files, registry, data, cache_folder)
        return
    check_values(target, findings)
    if files is not None:
        from draftworks.preflight.drafts import check_drafts

        if not unmet.unsound:
            check_probe_reach(target, files, findings)
        check_drafts(target, files, findings, unmet.unsound)
    if files is not None and data is not None:
        from draftworks.preflight.sample import check_sample

        check_sample(target, files, registry, findings)


def _check_data(
    target: TargetSpec, registry: Registry, findings: Findings, digests: FileDigests
) -> dict[str, str] | None:
    """Check that the data sets of a target and of its eval sets exist as readable files.

    Return the content digest of each by name; None if there is something wrong with one of them.
    """
    before = len(findings.errors)
    where = f"target {target.name}"
    for text in registry.find_unknown_names(target):
        findings.error(text)
    datasets, evals = registry.list_datasets(), registry.list_eval_sets()
    wanted: dict[str, str] = {}
    for name in filter(datasets.__contains__, target.training_datasets):
        with findings.collect_errors():
            wanted[registry.load_dataset(name).name] = f"{where}: data set {name}"
    for name in filter([*evals, HELDOUT].__contains__, target.evals):
        with findings.collect_errors():
            dataset = registry.load_eval_set(name).dataset
            if dataset not in datasets:
                continue  # reported with the names
            dataset = registry.load_dataset(dataset).name
            wanted.setdefault(dataset, f"{where}: eval set {name}: data set {dataset}")
    check_served_data(target, registry, findings)
    check_request_logs(target, registry, findings)
    for name, where_used in wanted.items():
        try:
            files = find_dataset_files(registry.load_dataset(name), registry.root)
        except DraftworksError as error:
            findings.error(f"{where_used}: {error}")
            continue
        findings.found += [
            Finding("error", f"{where_used}: {path} cannot be read") for path in files if not os.access(path, os.R_OK)
        ]
    if len(findings.errors) > before:
        return None
    with findings.collect_errors():
        return digest_datasets(target, registry, digests)
    return None
