"""Finds and records the assets that a target does not use: of strategies and eval sets of others, exports that it turns off.

Dagster requires one partitions definition for all assets of a job, so every asset has a partition for every target. A
run leaves out the assets that its target does not use (`spec_assets.executor`), and records once that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import StrategySpec, list_strategies, resolve_strategy
from draftworks.errors import ConfigError
from draftworks.storage.names import FP8_GATE, THINKING_COMPARISON, VOCAB_MAPPING, of_eval_set, of_strategy
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.training_data import resolve_draft_vocab_size

UNUSED = "unused"
"""Data version of the record of an unused asset, and the metadata key of its reason."""


def find_unused_assets(target: TargetSpec, registry: Registry) -> dict[str, str]:
    """Return the reason why an asset is unused, by name of each asset that the target does not use."""
    found: dict[str, str] = {}
    for name in registry.list_eval_sets():
        if name != HELDOUT and name not in target.evals:
            found |= dict.fromkeys(of_eval_set(name), f"target {target.name} does not list the eval set {name}")
    for name in list_strategies():
        found |= _find_unused_of(resolve_strategy(name), target)
    if target.capture.storage == "plain":
        found[FP8_GATE] = f"target {target.name} stores its features plain (capture.storage)"
    if not target.asks_both_ways:
        found[THINKING_COMPARISON] = f"target {target.name} has no shares of thinking (mix.shares)"
    if not _reduces_vocabulary(target):
        found[VOCAB_MAPPING] = f"no strategy of target {target.name} reduces the vocabulary"
    return found


def _find_unused_of(strategy: StrategySpec, target: TargetSpec) -> dict[str, str]:
    names = of_strategy(strategy.name)
    entry, serving = target.strategies.get(strategy.name), target.evaluation.serving
    if entry is None:
        return dict.fromkeys(names, f"target {target.name} does not use {strategy.name}")
    found: dict[str, str] = {}
    if target.service is None or entry.export.formats == [] or not strategy.exports:
        what = "service" if target.service is None else "export"
        found[names.promoted] = f"target {target.name} asks for no {what} of its {strategy.name} draft"
    if target.decision is None or names.promoted in found:
        found[names.decision] = f"target {target.name} asks for no decision about its {strategy.name} draft"
    if strategy.name not in target.observed_strategies:
        found[names.observed] = (
            f"target {target.name} has no servers with its {strategy.name} draft, or logs of them (servers, observation.requests)"
        )
    if entry.export.formats == []:
        found[names.export] = (
            f"target {target.name} wants no export of its {strategy.name} draft (export.formats is [])"
        )
    if not serving.prompts:
        found[names.serving] = f"target {target.name} asks for no serving check (evaluation.serving.prompts)"
    elif serving.format is not None and serving.format not in {made.name for made in strategy.exports}:
        found[names.serving] = (
            f"target {target.name} serves the format {serving.format}, which {strategy.name} does not have"
        )
    return found


def _reduces_vocabulary(target: TargetSpec) -> bool:
    try:
        return resolve_draft_vocab_size(target) is not None
    except ConfigError:  # two sizes: the step says so
        return True


class UnusedAsset(NamedTuple):
    """An asset that a target does not use."""

    asset: dg.AssetKey
    target: str
    reason: str


def record_unused(instance: dg.DagsterInstance, unused: Iterable[UnusedAsset]) -> None:
    """Record unused assets as materialized, so that their partitions are not missing. What is recorded already is
    left."""
    for one in unused:
        if _read_recorded_reason(instance, one) == one.reason:
            continue
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                one.asset,
                partition=one.target,
                description=f"Nothing to make: {one.reason}.",
                metadata={UNUSED: one.reason},
                tags={"dagster/data_version": UNUSED},
            )
        )


def _read_recorded_reason(instance: dg.DagsterInstance, one: UnusedAsset) -> object:
    of_partition = dg.AssetRecordsFilter(one.asset, asset_partitions=[one.target])
    for record in instance.fetch_materializations(of_partition, limit=1).records:
        made = record.asset_materialization
        return None if made is None or UNUSED not in made.metadata else made.metadata[UNUSED].value
    return None
