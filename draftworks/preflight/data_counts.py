"""Check that a target's data is enough for its parts: a global batch to train on, and prompts to measure on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.data.raw_rows import count_rows
from draftworks.data.sources import find_dataset_files
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_tokens import DataUse
from draftworks.storage.asset_names import HELDOUT
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry

_LEAST_EXPECTED = 3
"""Held-out rows to expect below which there may be none: each row is held out by its hash, and one set in 20 has none."""
_MOST_ROWS = 1_000_000
_MAX_LIST_BYTES = 16 << 20


def check_counts(target: TargetSpec, uses: Iterable[DataUse], registry: Registry, findings: Findings) -> None:
    """Check the number of rows of every part of the data: exact where all rows are known, otherwise to be expected."""
    known = {use.eval_set or "train": use for use in uses if use.whole}
    share, where = target.data.held_out_share, f"target {target.name}"
    asked = len({row.prompt_key for use in known.values() for row in use.rows})
    for use in known.values():
        if not use.rows:
            findings.error(
                f"{where}: {use.what}: none of {format_count(asked, 'prompt')} (data.held_out_share {share:g}). Give more "
                "conversations with other prompts, or change the share"
            )
    prompts = {name: float(len(use.rows)) for name, use in known.items() if name != "train"}
    if "train" in known:
        rows = len(known["train"].rows)
        several = known["train"].asked and not target.data.only_last_turn
        most = sum(row.answers for row in known["train"].rows) if several else rows
        _check_batches(target, rows, most, findings)
    else:
        total = _count_all(target, registry)
        if total is not None:
            single = target.responses.mode == "passthrough" or target.data.only_last_turn
            _check_batches(target, total * (1 - share), total - 1 if single else None, findings)
            prompts[HELDOUT] = total * share
            if total * share < _LEAST_EXPECTED:
                findings.warning(
                    f"{where}: about {total * share:.1f} of {total:,} conversations are held out (data.held_out_share "
                    f"{share:g}), and a run needs one. Raise the share, or give more"
                )
    _check_least_prompts(target, prompts, findings)


def count_dataset(dataset: DatasetSpec, root: Path, most: int) -> int | None:
    """Return how many rows a data set has at most, `most` if there are more; None if a large file had to be read whole.

    Raises:
        DataError: a file cannot be read.
    """
    found = 0
    for path in find_dataset_files(dataset, root):
        rows = count_rows(path, most - found, _MAX_LIST_BYTES)
        if rows is None:
            return None
        found += rows
        if found >= most:
            return most
    return found


def _count_all(target: TargetSpec, registry: Registry) -> int | None:
    """Return how many conversations are used at most; None if that is not known, or more than matters."""
    largest = max((entry.training.global_batch_size for entry in target.strategies.values()), default=0)
    share, least = target.data.held_out_share, max(_LEAST_EXPECTED, _find_least_prompts(target))
    enough = min(_MOST_ROWS, int(largest / (1 - share) + least / share) + 1)
    found, limit = 0, target.data.max_conversations
    for name in target.training_datasets:
        rows = count_dataset(registry.load_dataset(name), registry.root, enough)
        if rows is None or found + rows >= enough:
            return limit if limit is not None and limit < enough else None
        found += rows
    return found if limit is None else min(found, limit)


def _check_batches(target: TargetSpec, expected: float, most: int | None, findings: Findings) -> None:
    """Compare each strategy's global batch with the samples that are to be expected, and with the most there can be."""
    for name, entry in target.strategies.items():
        size = entry.training.global_batch_size
        where = f"target {target.name}: strategies.{name}.training.global_batch_size"
        advice = "not enough for one optimizer step. Lower it, or use more data"
        if most is not None and most < size:
            findings.error(f"{where}: found {size}, and there are at most {most:,} samples to train on: {advice}")
        elif expected < size:
            findings.warning(
                f"{where}: found {size}, and there are about {expected:,.0f} conversations to train on: {advice}"
            )


def _find_least_prompts(target: TargetSpec) -> int:
    return max((spec.least_prompts for spec in (target.service, target.decision) if spec is not None), default=0)


def _check_least_prompts(target: TargetSpec, prompts: Mapping[str, float], findings: Findings) -> None:
    """Warn of eval sets with so few prompts that nothing is ever decided by them."""
    least = _find_least_prompts(target)
    ways = 2 if target.asks_both_ways else 1
    for name, found in prompts.items():
        if 0 < ways * found < least:
            findings.warning(
                f"target {target.name}: eval set {name} has about {ways * found:,.0f} prompts, and below {least} "
                "(service.least_prompts, decision.least_prompts) nothing is decided. Give more, or lower them"
            )
