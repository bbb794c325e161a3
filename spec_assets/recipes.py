"""Recipes: the options of a target, one asset for each group of assets that reads the same of them; and its plan.

Dagster marks an asset as stale when the data version of one it depends on changes. With one version for all options, a
changed learning rate of one strategy would mark everything of all of them.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.preflight.compatibility import check_requirements
from draftworks.storage.identity import digest
from draftworks.storage.names import EVALUATION_RECIPE, RECIPE, of_strategy
from draftworks.targets.gguf_store import ensure_converted
from draftworks.targets.registry import Registry, apply_overrides, resolve_training_options
from draftworks.targets.resolve import read_num_layers
from draftworks.targets.training_data import collect_taps, resolve_draft_vocab_size
from resources.workspace import Workspace
from spec_assets.common import OWNERS, guard
from spec_assets.inputs import GROUP, require_sound_target
from spec_assets.metadata import format_table

log = logging.getLogger(__name__)


def describe_plans(workspace: Workspace, target: str) -> dict[str, dict[str, Any]]:
    """Return metadata for each `{strategy}_recipe`, and save the plan for the comparison of what the run takes.

    A plan decides nothing, so one that cannot be made is a word in the log and ends no run.
    """
    from draftworks.planning.plan import (
        compare_plan,
        load_plan,
        make_plan,  # one step of a run plans, and every process loads this module
        save_plan,
    )
    from draftworks.planning.plan_table import build_header, build_rows
    from draftworks.planning.subject import PlanSubject

    try:
        subject = PlanSubject.of(target, workspace.registry)
        saved = load_plan(workspace.var, target)
        actual = () if saved is None else compare_plan(saved, subject)
        found: dict[str, dict[str, Any]] = {}
        for strategy in subject.target.strategies:
            plan = make_plan(subject, [strategy])
            assets = {step.asset for way in plan.ways.values() for step in way.steps}
            took = [each for each in actual if each.step.asset in assets and each.seconds is not None]
            table = format_table(build_header(plan, took), build_rows(plan, took))
            found[of_strategy(strategy).recipe] = {"plan": table, "gpu_hours_left": plan.chosen.gpu_hours.value}
        save_plan(workspace.var, make_plan(subject))
        return found
    except DraftworksError as error:
        log.warning("the plan of target %s cannot be shown: %s", target, error)
    except Exception:  # a figure for people must not end a run
        log.warning("the plan of target %s cannot be shown", target, exc_info=True)
    return {}


DATA = """Options of data, answers and capture with defaults filled in, and what the strategies together need of them: taps
and the size of a reduced vocabulary. Its step also checks the whole entry of the target and what the run itself overrides,
so that a mistake there is found before anything is captured."""
EVALUATION = "How drafts of the target are measured: its eval sets, settings of the evaluation, where answers end."


def make_recipe_assets(strategies: Sequence[StrategySpec]) -> dg.AssetsDefinition:
    """`recipe`, `evaluation_recipe`, and of each strategy `{strategy}_recipe` and `{strategy}_export_recipe`, in one
    step.

    A target has those of the strategies that it uses.
    """
    specs = [_spec(RECIPE, DATA), _spec(EVALUATION_RECIPE, EVALUATION)]
    for strategy in strategies:
        names = of_strategy(strategy.name)
        specs.append(_spec(names.recipe, f"Options of the {strategy.name} draft and of its training."))
        if strategy.exports:
            specs.append(_spec(names.export_recipe, f"In which formats the {strategy.name} draft is exported."))

    @dg.multi_asset(name=RECIPE, specs=specs, can_subset=True)
    def recipe(context: dg.AssetExecutionContext, workspace: Workspace) -> Iterator[dg.MaterializeResult]:
        yield from guard(_resolve_recipes)(context, workspace)

    return recipe


def _spec(name: str, description: str) -> dg.AssetSpec:
    return dg.AssetSpec(
        name,
        description=description,
        group_name=GROUP,
        kinds={"yaml"},
        owners=OWNERS,
        code_version="2",
        skippable=True,
    )


def _resolve_recipes(context: dg.AssetExecutionContext, workspace: Workspace) -> list[dg.MaterializeResult]:
    target = workspace.registry.load_target(context.partition_key)
    _check_overrides(context, workspace, target)
    for name in target.evals:
        workspace.registry.load_eval_set(name)
    plans = describe_plans(workspace, target.name)
    return [
        dg.MaterializeResult(
            asset_key=name,
            data_version=dg.DataVersion(digest(options)),
            metadata={"options": dg.MetadataValue.json(options), **plans.get(name, {})},
        )
        for name, options in resolve_recipes(target, workspace.registry).items()
        if dg.AssetKey(name) in context.selected_asset_keys
    ]


def _check_overrides(context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec) -> None:
    """Raise ConfigError if an option of the entry or an override in the run config is wrong."""
    config: dict[str, Any] = dict(context.run.run_config)
    ops = config.get("ops", {})
    configs = {name: ops.get(of_strategy(name).draft, {}).get("config", {}) for name in target.strategies}
    overridden = {}
    for name, entry in target.strategies.items():
        overrides = (configs[name].get("options", {}), configs[name].get("training", {}))
        overridden[name] = apply_overrides(target.name, resolve_strategy(name), entry, *overrides)
    if any(configs.values()):
        ensure_converted(target, workspace.registry, workspace.digests, context.log.info)
        files = workspace.resolve_target_files(target.name)
        changed = target.model_copy(update={"strategies": overridden})
        check_requirements(changed, files, workspace.registry)
        require_sound_target(context, workspace, changed, files)


def resolve_recipes(target: TargetSpec, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return the options of each recipe asset that a target has, by asset name.

    Raises:
        ConfigError: the model is absent, or two strategies ask for contradicting values.
        StoreError: a draft to start from is absent.
    """
    found: dict[str, dict[str, Any]] = {
        RECIPE: {
            "max_length": target.max_length,
            "data": target.data.to_identity(),
            "responses": target.responses.to_identity(),
            "capture": target.capture.to_identity(),
            "taps": collect_taps(target, read_num_layers(target, registry)),
            "draft_vocab_size": resolve_draft_vocab_size(target),
        },
        EVALUATION_RECIPE: {
            "evals": sorted(target.evals),
            "evaluation": target.evaluation.to_identity(target.strategies),
            "max_new_tokens": target.responses.max_new_tokens,
            "max_length": target.max_length,
        },
    }
    for strategy, entry in target.strategies.items():
        names = of_strategy(strategy)
        found[names.recipe] = resolve_training_options(target, strategy, registry)
        found[names.export_recipe] = entry.export.model_dump()
    return found
