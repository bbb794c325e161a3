"""Pre-flight examination of a target: its entry, files and data, without loading its weights.

Torch-free to import: torch, transformers and pyarrow are imported only after the cheap checks.
"""

from __future__ import annotations

import os
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.sources import find_dataset_files
from draftworks.errors import DraftworksError
from draftworks.preflight.cached_examination import TARGET_CHECKS, examine_before_run
from draftworks.preflight.compatibility import UnmetRequirements, find_unmet
from draftworks.preflight.decisions import check_decision, check_least_prompts
from draftworks.preflight.feature_budget import check_feature_budget
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.fp8_gate import check_fp8_gate
from draftworks.preflight.machine import check_machine
from draftworks.preflight.made_dtypes import check_made_dtypes
from draftworks.preflight.placement import check_placement
from draftworks.preflight.plausible_values import check_values
from draftworks.preflight.probe_reach import check_probe_reach
from draftworks.preflight.quantizers import check_quantizer
from draftworks.preflight.served_data import check_served_data
from draftworks.preflight.vocabulary import check_coverage
from draftworks.sglang.families import list_sglang_remarks
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.targets.fitted_defaults import describe_fitted
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import digest_datasets
from draftworks.targets.weights import WEIGHT_CHECKS, check_target_weights


def examine_entry(name: str, registry: Registry, digests: FileDigests, var: Path | None = None) -> tuple[Finding, ...]:
    """Return all findings about a target of the registry. An invalid entry is a finding too, and does not raise.

    Args:
        var: folder of results, in which runs keep what they found out about files, drafts and data, by content; what is
            known there is not found out again. None keeps nothing.
    """
    findings = Findings()
    target = None
    with findings.collect_errors():
        target = registry.load_target(name)
    if target is None:
        target = registry.salvage_target(name)
        if target is None:
            return tuple(findings.found)
        return _examine_loaded(target, registry, findings, digests, var)
    for line in describe_fitted(registry.read_target(name), target):
        findings.note(f"target {name}: {line}")
    if var is not None:
        check_made_dtypes(target, registry, ArtifactStore(var), findings)
    return _examine_loaded(target, registry, findings, digests, var)


def _examine_loaded(
    target: TargetSpec, registry: Registry, findings: Findings, digests: FileDigests, var: Path | None
) -> tuple[Finding, ...]:
    """Return the findings so far, with all about the files, data and drafts of an entry."""
    name, files = target.name, None
    try:
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
