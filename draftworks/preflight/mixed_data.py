"""Checks of a mix that its data sets' rows show: data that cannot be mixed, and shares of slices that no row has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from draftworks.config.mix import THINKING
from draftworks.config.registry_files import TargetSpec
from draftworks.data.slice_columns import LANGUAGE, PROMPT_LENGTH, PROMPT_LENGTHS, SOURCE
from draftworks.data.sources import SERVED
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import Sample, find_absent_values
from draftworks.storage.suggestions import list_fitting, suggest
from draftworks.targets.registry import Registry


def check_mix(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report data of a mix that is tokenized already, and slices with a share that no data set has.

    Args:
        samples: by the name of the data set, of all that are trained on.
    """
    if target.mix is None:
        return
    for name in target.training_datasets:
        if samples[name].kind == "tokens":
            findings.error(
                f"target {target.name}: mix: data set {name} is tokenized already, and only conversations can be mixed"
            )
            return
    for column, shares in target.mix.shares.items():
        absent = _find_absent(column, {value for value, share in shares.items() if share}, target, registry)
        if column == SOURCE:
            _check_sources(absent, target, samples, registry, findings)
        elif absent:
            _report_absent(findings.error, column, absent, target, ())


def _check_sources(
    absent: set[str], target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings
) -> None:
    """Report sources with a share that no data set is or names. Logs may name sources of their own in any row."""
    logs = [samples[name] for name in target.training_datasets if registry.load_dataset(name).format == SERVED]
    seen = {str(item.columns[SOURCE]) for sample in logs for item in sample.items if SOURCE in item.columns}
    if absent - seen:
        report = findings.error if all(sample.whole for sample in logs) else findings.warning
        _report_absent(report, SOURCE, absent - seen, target, {*target.training_datasets, *seen})


def _report_absent(
    report: Callable[[str], None], column: str, absent: set[str], target: TargetSpec, known: Collection[str]
) -> None:
    first = min(absent)
    hint = f"; {suggest(first, sorted(known)) or f'there are {list_fitting(sorted(known))}.'}" if known else "."
    report(
        f"target {target.name}: mix.shares: {column}: no conversation has {list_fitting(sorted(absent), 40)}{hint} Set the share to "
        "0, or give data with it"
    )


def _find_absent(column: str, wanted: set[str], target: TargetSpec, registry: Registry) -> set[str]:
    """Return the values that no row of any data set has; none where they are found out by reading prompts."""
    if column in (THINKING, LANGUAGE):
        return set()
    if column == PROMPT_LENGTH:
        wanted = wanted - set(PROMPT_LENGTHS)
    if column == SOURCE:
        wanted = wanted - set(target.training_datasets)
    for name in target.training_datasets:
        dataset = registry.load_dataset(name)
        if dataset.format != SERVED and wanted:
            wanted = find_absent_values(column, wanted, dataset, registry.root)
    return wanted
