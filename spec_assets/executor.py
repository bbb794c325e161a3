"""The executor of runs: steps whose results exist run in the run's process, all others in a process each.

It rejects a run without a valid target before the first step, and one whose scheduler or object storage refuses before the
first that makes something; it logs the first cause of a failed run after the last.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError, DraftworksError
from draftworks.preflight.services import FEATURES, PUBLISH, find_storage_problems
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import describe_new_strategy
from resources.dagster_internals import (
    DagsterUserCodeProcessError,
    EngineEventData,
    ExecuteRunWithPlanIterable,
    PlanExecutionContextManager,
    ResolvedRunConfig,
    inner_plan_execution_iterator,
)
from resources.launcher_checks import find_launcher_problems
from resources.run_problems import RunProblems
from spec_assets.common import PROGRAM_TAG, assign_pools
from spec_assets.unchanged import find_unchanged_steps
from spec_assets.unused import UnusedAsset, find_unused_assets, record_unused


def find_unmade_strategies(target: TargetSpec, whole: Set[str], chosen: Set[str]) -> list[str]:
    """Return the strategies of a target of which a run makes nothing although its job does; none where a run lacks
    something else too, which somebody has chosen so.

    Args:
        whole: names of the assets of the run's job.
        chosen: those that the run makes.
    """
    unmade, found = set(whole - chosen), []
    for name in target.strategies:
        names = of_strategy(name)
        assets = whole & set(names)
        if assets and not chosen & (assets - {names.recipe, names.export_recipe}):
            found.append(name)
            unmade -= assets
    return [] if unmade else found


def list_assets_of_job(job: Any, name: str) -> set[str]:
    """Return the names of the assets of a job, whatever a run selects of them."""
    repository: dg.RepositoryDefinition | None = job.get_repository_definition()
    definition = job.get_definition() if repository is None else repository.get_job(name)
    return to_names(definition.asset_layer.selected_asset_keys)


def to_names(keys: Iterable[dg.AssetKey]) -> set[str]:
    return {key.to_user_string() for key in keys}


_WRITTEN_BY = {FEATURES: "capture", PUBLISH: "evaluate"}
"""By the deployment's key of a bucket, the program of the steps that write there."""


def require_reachable(plan: Any, target: str | None, registry: Registry) -> None:
    """Raise if a scheduler or object storage that the steps of a plan use cannot be reached, or refuses.

    It costs nothing where jobs run on this machine and features are in files. What cannot be read of the target's
    entry is left to its first step.

    Raises:
        ConfigError: all that was found.
    """
    programs = {step.tags[PROGRAM_TAG] for step in plan.steps if PROGRAM_TAG in (step.tags or {})}
    if target is None or not programs:
        return
    try:
        spec = registry.load_target(target)
        problems = find_launcher_problems(spec, registry, programs)
        problems += find_storage_problems(registry, [key for key, by in _WRITTEN_BY.items() if by in programs])
    except DraftworksError:
        return
    if problems:
        raise ConfigError("\n".join(problems))


RECORD_POLL_S = 5.0
"""Between two looks at the run's record."""


def interrupt_this_process() -> None:
    """Send SIGINT to this process: Dagster then ends the run's steps, and each step ends its job."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def end_with_record(
    instance: dg.DagsterInstance,
    run_id: str,
    end: Callable[[], None] = interrupt_this_process,
    every_s: float = RECORD_POLL_S,
) -> Iterator[None]:
    """Call `end` once if the run's record is finished or deleted while the body of the `with` still runs."""
    over = threading.Event()

    def watch_record() -> None:
        while not over.wait(every_s):
            try:
                run = instance.get_run_by_id(run_id)
            except Exception:  # the storage may be unreachable for a while
                continue
            if (run is None or run.is_finished) and not over.is_set():
                end()
                return

    threading.Thread(target=watch_record, name="run-record", daemon=True).start()
    try:
        yield
    finally:
        over.set()


PARTITION_TAG = "dagster/partition"
HOME = "DAGSTER_HOME"
UNRECORDED = (
    f"{HOME} is not set: this run will not be in the UI, and no pool prevents two programs from using one GPU at a time. "
    f"Set it to a folder with a dagster.yaml, as `draftworks run` and `make` do"
)


def make_executor(registry: Registry, preload: Sequence[str]) -> dg.ExecutorDefinition:
    """Return the executor. Step processes are forked from one that has imported `preload`, which saves seconds in
    each."""
    create = dg.multiprocess_executor.executor_creation_fn
    assert create is not None
    wrapped = dg.ExecutorDefinition(
        name=dg.multiprocess_executor.name,
        config_schema=cast(Any, dg.multiprocess_executor.config_schema),
        requirements=dg.multiprocess_executor.get_requirements,
        executor_creation_fn=lambda context: RunExecutor(create(context), context.job, registry),
    )
    return wrapped.configured({"max_concurrent": 2, "start_method": {"forkserver": {"preload_modules": list(preload)}}})


class RunExecutor(dg.Executor):
    """Wraps another executor: rejects a run that cannot work, leaves out unused steps, and logs the cause of a failed
    run.

    Only the run's process can log the cause reliably: the output of a step's process passes through a `tail`, which
    Dagster ends together with the step even if it has not copied everything."""

    def __init__(self, inner: dg.Executor, job: Any, registry: Registry) -> None:
        self._inner = inner
        self._job = job
        self._registry = registry

    @property
    def retries(self) -> Any:
        return self._inner.retries

    @property
    def step_dependency_config(self) -> Any:
        return self._inner.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        """Yield the events of the run's steps. Raises if the run names no target, or one that is not in the
        registry."""
        if self._job.get_definition().partitions_def is not None:
            with raise_without_traceback():
                check_partition(self._registry, plan_context.dagster_run.tags)
        if not os.environ.get(HOME):
            plan_context.log.warning(UNRECORDED)
        self._tell_of_new_strategies(plan_context, execution_plan)
        problems = RunProblems()
        try:
            with end_with_record(plan_context.instance, plan_context.run_id):
                for event in self._execute_used(plan_context, self._select_used_part(plan_context, execution_plan)):
                    problems.note(event)
                    yield event
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            plan_context.log.warning(problems.describe_interruption())
            raise
        except dg.DagsterSubprocessError:
            plan_context.log.error(problems.describe_crash())
            raise
        reason = problems.describe_failure()
        if reason is not None:
            plan_context.log.error(reason)

    def _execute_used(self, plan_context: Any, plan: Any) -> Iterator[dg.DagsterEvent]:
        """Execute the unchanged steps in this process, then the other steps with the inner executor."""
        target, job = plan_context.dagster_run.tags.get(PARTITION_TAG), self._job.get_definition()
        unchanged: list[str] = []
        if target is not None:
            unchanged = find_unchanged_steps(
                plan, job, target, plan_context.dagster_run.run_config, self._registry.root
            )
        stopped: set[str] = set()
        if unchanged:
            for event in execute_here(plan_context, self._build_subset(plan_context, plan, unchanged)):
                if event.is_step_failure:
                    stopped.add(event.step_key or "")
                yield event
        before = plan.get_executable_step_deps()
        left = []
        for step in plan.get_steps_to_execute_in_topo_order():
            if before[step.key] & stopped:
                stopped.add(step.key)
            elif step.key not in unchanged:
                left.append(step.key)
        if left:
            subset = self._build_subset(plan_context, plan, left)
            with raise_without_traceback():
                require_reachable(subset, target, self._registry)
            yield from self._inner.execute(plan_context, assign_pools(subset, target, self._registry))

    def _build_subset(self, plan_context: Any, plan: Any, steps: Sequence[str]) -> Any:
        job = self._job.get_definition()
        return plan.build_subset_plan(steps, job, ResolvedRunConfig.build(job, plan_context.dagster_run.run_config))

    def _select_used_part(self, plan_context: Any, plan: Any) -> Any:
        """Return the plan without the steps of unused assets, and record these assets as unused."""
        target = plan_context.dagster_run.tags.get(PARTITION_TAG)
        spec = self._find_target(target)
        reasons = {} if spec is None else find_unused_assets(spec, self._registry)
        assets_of = {step.key: list_assets_of_step(step) for step in plan.steps}
        unused = {asset for assets in assets_of.values() for asset in assets if asset.to_user_string() in reasons}
        if not unused:
            return plan
        recorded = [UnusedAsset(asset, target, reasons[asset.to_user_string()]) for asset in unused]
        record_unused(plan_context.instance, recorded)
        used = [key for key in plan.step_keys_to_execute if not assets_of[key] or assets_of[key] - unused]
        return self._build_subset(plan_context, plan, used)

    def _tell_of_new_strategies(self, plan_context: Any, plan: Any) -> None:
        """Log a warning for each strategy of the target that the code location did not have when it started the run."""
        run = plan_context.dagster_run
        target = self._find_target(run.tags.get(PARTITION_TAG))
        if target is None or (run.step_keys_to_execute is None and run.asset_selection is None):
            return
        steps = (plan.get_step_by_key(key) for key in plan.step_keys_to_execute)
        chosen = to_names(set().union(*map(list_assets_of_step, steps)))
        for name in find_unmade_strategies(target, list_assets_of_job(self._job, run.job_name), chosen):
            plan_context.log.warning(f"{describe_new_strategy(name)}. This run was started without its assets")

    def _find_target(self, name: str | None) -> TargetSpec | None:
        """Return the run's target; None without one, or if its entry cannot be read, which its first step reports."""
        try:
            return None if name is None else self._registry.load_target(name)
        except DraftworksError:
            return None


def execute_here(plan_context: Any, plan: Any) -> Iterator[dg.DagsterEvent]:
    """Execute the steps of a plan one after the other in this process, as Dagster's in-process executor does.

    Unlike there no step claims a slot of its pool: these steps make nothing, and Dagster could not be interrupted while it
    waits for a slot here.
    """
    data = EngineEventData.in_process(os.getpid(), plan.step_keys_to_execute)
    yield dg.DagsterEvent.engine_event(
        plan_context, "Executing in this process the steps that find everything made", data
    )
    context = PlanExecutionContextManager(
        job=plan_context.job,
        retry_mode=plan_context.retry_mode,
        execution_plan=plan,
        run_config=plan_context.run_config,
        dagster_run=plan_context.dagster_run,
        instance=plan_context.instance,
        raise_on_error=False,
    )
    yield from ExecuteRunWithPlanIterable(plan, inner_plan_execution_iterator, context)


def list_assets_of_step(step: Any) -> set[dg.AssetKey]:
    """Return the keys of the assets that a step makes or checks."""
    properties = [output.properties for output in step.step_outputs]
    keys = {found.asset_key or (found.asset_check_key and found.asset_check_key.asset_key) for found in properties}
    return keys - {None}


@contextmanager
def raise_without_traceback() -> Iterator[None]:
    """Re-raise a ConfigError so that Dagster shows its message without a traceback of this file."""
    try:
        yield
    except ConfigError as error:
        info = SerializableErrorInfo(message=str(error), stack=[], cls_name=type(error).__name__)
        raise DagsterUserCodeProcessError(str(error), user_code_process_error_infos=[info]) from None


def check_partition(registry: Registry, tags: dict[str, str]) -> None:
    """Raise ConfigError if a run has no partition, or one that is not a target; the message says how to give one."""
    found = tags.get(PARTITION_TAG)
    targets = registry.list_targets()
    if found is None:
        raise ConfigError(
            f"the run has no target: expected the tag {PARTITION_TAG}, found none. Add --tags "
            f'\'{{"{PARTITION_TAG}": "{targets[0] if targets else "NAME"}"}}\', or use `draftworks run JOB --target NAME`'
        )
    registry.find_target_file(found)
