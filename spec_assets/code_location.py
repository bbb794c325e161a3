"""Everything Dagster knows, built from one registry folder, and its partitions. Importing this module reads no registry."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.targets.registry import HELDOUT, ReadOnceRegistry, Registry
from draftworks.targets.training_data import list_used_strategies
from jobs.pruning import make_prune_job
from jobs.standard import make_jobs
from resources.dead_runs import list_preloaded
from resources.deployment_launcher import make_deployment_launcher
from resources.engine_servers import SGLangServer, VLLMServer
from resources.workspace import Workspace
from sensors import make_schedules, make_sensors
from spec_assets import data, features, inputs
from spec_assets.console import console
from spec_assets.decisions import list_decided_strategies, make_decision_asset, make_decision_jobs
from spec_assets.drafts import make_draft_asset, make_draft_check
from spec_assets.evals import (
    find_eval_users,
    make_eval_answers_check,
    make_eval_features_asset,
    make_eval_features_check,
    make_eval_set_assets,
)
from spec_assets.executor import make_executor
from spec_assets.exports import make_export_asset, make_export_checks
from spec_assets.fleet import fleet_page
from spec_assets.fp8_gate import fp8_gate
from spec_assets.gates import make_report_checks
from spec_assets.leaderboard import make_leaderboard_asset
from spec_assets.observation import list_observed_strategies, make_observe_jobs, make_observed_asset
from spec_assets.promotion import list_promoted_strategies, make_promoted_asset, make_promoted_check, make_service_jobs
from spec_assets.recipes import make_recipe_assets
from spec_assets.reports import make_report_asset
from spec_assets.serving import make_serving_asset, make_serving_check
from spec_assets.thinking_comparison import thinking_comparison


def make_target_partitions(registry: Registry) -> dg.StaticPartitionsDefinition:
    """Return a partition for each file name. An entry with an error is a partition too, and its first step reports
    the error."""
    return dg.StaticPartitionsDefinition(registry.list_targets())


def partition_assets(assets: list[dg.AssetsDefinition], targets: dg.PartitionsDefinition) -> list[dg.AssetsDefinition]:
    """Return the assets with their own checks, partitioned by target."""
    mapped = dg.map_asset_specs(lambda spec: spec.replace_attributes(partitions_def=targets), assets)
    return partition_checks(mapped, targets)


def partition_checks(
    made: Iterable[dg.AssetsDefinition], targets: dg.PartitionsDefinition
) -> list[dg.AssetsDefinition]:
    """Return the definitions with their checks partitioned by target; otherwise all targets share the newest check
    result.

    Dagster warns once for each check that partitions of checks are a preview.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [_partition_checks_of(each, targets) for each in made]


def _partition_checks_of(made: dg.AssetsDefinition, targets: dg.PartitionsDefinition) -> dg.AssetsDefinition:
    """Return the definition with its checks partitioned by target, by the way in which Dagster's `with_attributes` does.

    Dagster has `map_asset_specs`, but no counterpart for checks.
    """
    specs = {name: _partition_check(spec, targets) for name, spec in made.node_check_specs_by_output_name.items()}
    if not specs:
        return made
    return type(made).dagster_internal_init(**{**made.get_attributes_dict(), "check_specs_by_output_name": specs})


def _partition_check(spec: dg.AssetCheckSpec, targets: dg.PartitionsDefinition) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        spec.name,
        asset=spec.asset_key,
        description=spec.description,
        additional_deps=spec.additional_deps,
        blocking=spec.blocking,
        metadata=spec.metadata,
        automation_condition=spec.automation_condition,
        partitions_def=targets,
    )


MODULES = [inputs, data, features]


def build_definitions(registry_root: Path, module: str = __name__) -> dg.Definitions:
    """Return the Dagster definitions for a registry folder; each deployment has a folder of its own.

    Of strategies that no target uses there are no assets, checks and jobs.

    Args:
        module: what the processes of steps are to have imported, which is this one unless another holds the definitions
            of this registry.
    """
    registry, loading = Registry(registry_root), ReadOnceRegistry(registry_root)  # of all that is asked while loading
    targets, evals = make_target_partitions(loading), list_free_eval_names(loading)
    measured = find_eval_users(loading, evals)
    strategies = [resolve_strategy(name) for name in list_used_strategies(loading)]
    exported = [strategy for strategy in strategies if strategy.exports]
    in_service = list_promoted_strategies(loading)
    promoted = [strategy for strategy in exported if strategy.name in in_service]
    to_decide = list_decided_strategies(loading)
    decided = [strategy for strategy in promoted if strategy.name in to_decide]
    training = _make_training_jobs(decided) if decided else []
    deciding = make_decision_jobs(each.name for each in decided)
    in_production = list_observed_strategies(loading)
    observed = [strategy for strategy in strategies if strategy.name in in_production]
    assets = [
        *dg.load_assets_from_modules(MODULES),
        make_recipe_assets(strategies),
        *(made for name in evals for made in make_eval_set_assets(name)),
        *(make_eval_features_asset(name) for name in [HELDOUT, *evals]),
        *(make_draft_asset(strategy) for strategy in strategies),
        *(make_report_asset(strategy, measured) for strategy in strategies),
        *map(make_export_asset, exported),
        *map(make_serving_asset, exported),
        fp8_gate,
        thinking_comparison,
        *map(make_promoted_asset, promoted),
        *(make_decision_asset(strategy, measured) for strategy in decided),
        *map(make_observed_asset, observed),
    ]
    checks = _make_checks(evals, strategies, exported, promoted)
    workspace = Workspace(registry_root=str(registry_root))
    return dg.Definitions(
        assets=[*partition_assets(assets, targets), make_leaderboard_asset(strategies), fleet_page],
        asset_checks=partition_checks(checks, targets),
        jobs=[
            *make_jobs(evals, strategies, [each.name for each in decided]),
            make_prune_job(),
            *make_service_jobs(each.name for each in promoted),
            *deciding,
            *training,
            *make_observe_jobs(in_production),
        ],
        sensors=make_sensors(registry, [*deciding, *training], [each.name for each in decided]),
        schedules=make_schedules(registry),
        resources={
            "workspace": workspace,
            "launcher": make_deployment_launcher(registry.load_deployment().launcher),
            "sglang": SGLangServer(**workspace.sglang.model_dump()),
            "vllm": VLLMServer(**workspace.vllm.model_dump()),
        },
        executor=make_executor(registry, preload=list_preloaded(module)),
        loggers={"console": console},
    )


def _make_checks(
    evals: Sequence[str],
    strategies: Sequence[StrategySpec],
    exported: Sequence[StrategySpec],
    promoted: Sequence[StrategySpec],
) -> list[dg.AssetChecksDefinition]:
    """Return the checks that are steps of their own; those of other assets come with them."""
    return [
        *map(make_eval_answers_check, evals),
        *map(make_eval_features_check, [HELDOUT, *evals]),
        *map(make_draft_check, strategies),
        *map(make_report_checks, strategies),
        *map(make_export_checks, exported),
        *map(make_serving_check, exported),
        *map(make_promoted_check, promoted),
    ]


def _make_training_jobs(strategies: Sequence[StrategySpec]) -> list[Any]:
    from jobs.standard import make_training_jobs

    return make_training_jobs(each.name for each in strategies)


def list_free_eval_names(registry: Registry) -> list[str]:
    """Return the names of eval sets that get assets: all but `heldout`, whose asset names are taken.

    `draftworks check` and the targets that list such a set report it.
    """
    return [name for name in registry.list_eval_sets() if name != HELDOUT]
