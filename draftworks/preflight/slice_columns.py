"""Check that every column of `evaluation.slices` is one of at least one eval set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftworks.config.mix import THINKING
from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.data.slice_columns import LENGTH, SLICE_COLUMNS, THINKING_PAIR
from draftworks.data.sources import SERVED
from draftworks.errors import DataError
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import Sample, find_absent_columns
from draftworks.storage.suggestions import suggest_or_list
from draftworks.targets.registry import Registry


def check_slices(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report a column to slice by that no eval set has; the reports of those that lack it say so, if one has it.

    Args:
        samples: by the name of the data set, of all from which eval sets are made.
    """
    datasets = [registry.load_dataset(name) for name in samples]
    known = _list_made_columns(target, datasets)
    known |= {name for sample in samples.values() for item in sample.items for name in item.columns}
    for name in _find_absent(target.evaluation.slices, known, datasets, registry):
        hint = suggest_or_list(name, sorted(known))
        findings.error(f"target {target.name}: evaluation.slices: no eval set has a column {name!r}; {hint}")


def _list_made_columns(target: TargetSpec, datasets: Sequence[DatasetSpec]) -> set[str]:
    """Return the columns that eval sets have beside those of their data's rows."""
    found = {LENGTH}
    if target.mix is not None or any(dataset.format == SERVED for dataset in datasets):
        found |= set(SLICE_COLUMNS)
    return found | ({THINKING, THINKING_PAIR} if target.asks_both_ways else set())


def _find_absent(
    wanted: Sequence[str], known: set[str], datasets: Sequence[DatasetSpec], registry: Registry
) -> list[str]:
    """Return the columns that no eval set has. Later rows of JSON may have a column that the first ones lack."""
    left = set(wanted) - known
    try:
        for dataset in datasets:
            if left and dataset.format != SERVED:  # served prompts have the slice columns and no other
                left = find_absent_columns(left, dataset, registry.root)
    except DataError:
        return []  # of files that cannot be read: reported by those who read them
    return [name for name in wanted if name in left]
