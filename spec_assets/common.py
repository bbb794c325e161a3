"""Shared by all asset modules: the asset decorator, pools, results as Dagster records them, the launch of programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.capture.software import EnginePython
from draftworks.config.launchers import DEFAULT_POOL, LOCAL
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import RunFile
from draftworks.config.service import Outcome
from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.planning.identities import identify_result
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.files import explain_full_disk
from draftworks.storage.names import of_strategy
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry
from resources.companions import Companion
from resources.dead_runs import end_with_run_process
from resources.job_claims import CLAIM, end_abandoned_job
from resources.job_identity import identify_job
from resources.run_problems import describe_check
from resources.torch_job import TorchJob
from resources.torch_launcher import JobResult, PeerJob, TorchLauncher
from resources.workspace import Workspace
from spec_assets.metadata import round_figures, shorten_path
from spec_assets.unused import find_unused_assets

PROGRAM_TAG = "draftworks/program"


def wait_in_pool_of(program: str) -> dict[str, Any]:
    """Return the options of an asset whose step waits in the pool of a program's launcher."""
    return {"pool": DEFAULT_POOL, "op_tags": {PROGRAM_TAG: program}}


def assign_pools(plan: Any, target: str | None, registry: Registry) -> Any:
    """Return a plan whose steps wait in the pools of their launchers for a target.

    The plan is as it was where the target's entry cannot be read, which its first step reports.
    """
    if target is None:
        return plan
    programs = {step.tags[PROGRAM_TAG] for step in plan.steps if PROGRAM_TAG in (step.tags or {})}
    try:
        spec = registry.load_target(target)
        pools = {program: registry.resolve_launcher(spec, program).pool for program in programs}
    except DraftworksError:
        return plan
    steps = {handle: _assign_pool(step, pools) for handle, step in plan.step_dict.items()}
    return plan._replace(step_dict=steps, step_dict_by_key={step.key: step for step in steps.values()})


def _assign_pool(step: Any, pools: dict[str, str | None]) -> Any:
    program = (step.tags or {}).get(PROGRAM_TAG)
    return step if program is None else step._replace(pool=pools[program])


OWNERS = ["team:drafts"]


class NothingToDo(Exception):
    """Raised by an optional asset that a target does not have, with the reason."""


def asset(
    *,
    group: str,
    kinds: Iterable[str],
    code_version: str = "1",
    optional: bool = False,
    program: str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return the decorator `dg.asset` with this project's defaults.

    A DraftworksError becomes a failure with its message and no retry, and the step does not outlive its run's process.

    Args:
        optional: the asset may raise `NothingToDo` for a target that has none. It then yields nothing, the run
            succeeds, and Dagster skips its checks and all assets that depend on it.
        program: the program that the step runs, which may need a GPU: the step waits in the pool of this program's
            launcher (`spec_assets.common`).
    """
    waiting = {} if program is None else wait_in_pool_of(program)

    def decorate(function: Callable[..., dg.MaterializeResult]) -> dg.AssetsDefinition:
        checked = guard(function)
        return dg.asset(
            group_name=group,
            kinds=set(kinds),
            owners=OWNERS,
            code_version=code_version,
            output_required=not optional,
            **waiting,
            **options,
        )(_allow_nothing(checked) if optional else checked)

    return decorate


def guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an asset's function: DraftworksErrors become dagster Failures, and the step ends when the run's process
    ends."""

    @functools.wraps(function)
    def call(context: dg.AssetExecutionContext, *args: Any, **kwargs: Any) -> Any:
        end_with_run_process(context)
        with translate_errors():
            return function(context, *args, **kwargs)

    return call


def _allow_nothing(function: Callable[..., dg.MaterializeResult]) -> Callable[..., Any]:
    """Wrap an asset's function as a generator, the only form in which Dagster lets an asset yield no output."""

    @functools.wraps(function)
    def generate(
        context: dg.AssetExecutionContext, *args: Any, **kwargs: Any
    ) -> Generator[dg.MaterializeResult, None, None]:
        try:
            result = function(context, *args, **kwargs)
        except NothingToDo as reason:
            context.log.info(f"{reason}: nothing to do")
        else:
            yield result

    return generate


@contextmanager
def translate_errors() -> Generator[None, None, None]:
    """Re-raise a DraftworksError, or an error of a full disk, as a dagster Failure with its message and no retry."""
    try:
        yield
    except DraftworksError as error:
        raise dg.Failure(description=str(error), allow_retries=False) from None
    except Exception as error:
        full = explain_full_disk(error, Path.cwd())
        if full is None or isinstance(error, (dg.Failure, dg.RetryRequested)):
            raise
        raise dg.Failure(description=str(full), allow_retries=False) from error


def require_target(context: dg.AssetExecutionContext, workspace: Workspace) -> TargetSpec:
    """Return the target of this step, for an asset that not every target has.

    Raises:
        NothingToDo: the target has no such asset. Only Dagster's other executors reach this; ours leaves the step out.
    """
    target = workspace.registry.load_target(context.partition_key)
    reason = find_unused_assets(target, workspace.registry).get(context.asset_key.to_user_string())
    if reason is not None:
        raise NothingToDo(reason)
    return target


def require_draft(workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> Artifact:
    """Return the newest draft of a strategy.

    Raises:
        NothingToDo: there is none yet. The job `evaluate` measures the drafts that exist and does not fail for others.
    """
    draft = workspace.artifacts.find(of_strategy(strategy.name).draft, target.name)
    if draft is None:
        raise NothingToDo(f"target {target.name} has no {strategy.name} draft yet")
    return draft


@contextmanager
def retry_on_failure(
    context: dg.AssetExecutionContext, times: int, delay_s: float = 5.0
) -> Generator[None, None, None]:
    """Request a retry of the step after a failure that a retry can fix, such as a killed rank or a pre-emption.

    A `RetryPolicy` would also retry steps of a cancelled run, which Dagster takes for failed ones.
    """
    try:
        yield
    except dg.Failure as failure:
        if not failure.allow_retries or context.retry_number >= times:
            raise
        context.log.warning(
            f"{failure.description}\nTrying again in {delay_s:g} s: retry {context.retry_number + 1} of {times}"
        )
        raise dg.RetryRequested(max_retries=times, seconds_to_wait=delay_s) from failure


def obtain_result(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    build: Callable[[Path], BuildResult],
    identity: dict[str, Any] | None = None,
    **options: Any,
) -> Artifact:
    """Return the result of this step's asset and partition from the artifact store; build it if there is none.

    Options are those of `ArtifactStore.obtain`.

    Args:
        identity: without the asset's code version; by default that of `identify_result`.
    """
    asset = context.asset_key.to_user_string()
    if identity is None:
        identity = identify_result(workspace.results, workspace.registry.load_target(context.partition_key), asset)
    else:
        identity = {**identity, "code_version": context.assets_def.get_asset_spec(context.asset_key).code_version}
    if options.get("start_over"):
        # Before its folder is removed: what a killed run has left in a scheduler would go on to write there.
        ended = end_abandoned_job(workspace.artifacts.locate_partial(asset, context.partition_key, identity) / CLAIM)
        if ended is not None:
            context.log.info(f"job {ended} of a killed run is ended, since this run starts over")
    return workspace.artifacts.obtain(asset, context.partition_key, identity, build, **options)


def require_publishable(workspace: Workspace) -> None:
    """Raise before a result is made if the deployment publishes to object storage that cannot be written to."""
    if workspace.publication is not None:
        workspace.publication.require_writable()


def publish_result(context: dg.AssetExecutionContext, workspace: Workspace, artifact: Artifact) -> dict[str, Any]:
    """Copy a result to the deployment's object storage, if it names one; return metadata with its URL."""
    if workspace.publication is None:
        return {}
    published = workspace.publication.publish(artifact)
    if published.files:
        context.log.info(f"{format_count(published.files, 'file')} published to {published.url}")
    return {"published": published.url}


def report_result(
    context: dg.AssetExecutionContext,
    artifact: Artifact,
    metadata: Mapping[str, Any],
    checks: Iterable[dg.AssetCheckResult] = (),
) -> dg.MaterializeResult:
    """Return Dagster's record of a published result: data version, identity, path, and metadata for people."""
    context.log.info("unchanged, nothing to do" if artifact.hit else f"made in {artifact.seconds:.1f} s")
    checks = [report_check(context, check) for check in checks]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(artifact.data_version),
        metadata={
            **round_figures(metadata),
            "cache": "hit" if artifact.hit else "built",
            "identity": artifact.path.name,
            "path": shorten_path(artifact),
            "seconds_to_build": round(artifact.seconds, 1),
        },
        check_results=checks,
    )


def report_check(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, check: dg.AssetCheckResult
) -> dg.AssetCheckResult:
    """Return a check's result with rounded figures; write a failure to the log, since Dagster logs no reason."""
    check = check._replace(metadata=round_figures(check.metadata))
    if not check.passed:
        log = context.log.error if check.severity is dg.AssetCheckSeverity.ERROR else context.log.warning
        name = check.check_name or context.op_execution_context.op_handle.name
        log(f"check {name} failed: {describe_check(check)}")
    return check


def to_severity(outcome: Outcome) -> dg.AssetCheckSeverity:
    """Return the severity of a failed check from the target's `gates` entry."""
    return dg.AssetCheckSeverity.ERROR if outcome == "error" else dg.AssetCheckSeverity.WARN


def list_selected_assets(context: dg.AssetExecutionContext) -> set[str]:
    """Return the names of the assets that the run makes, those of several assets in one step left out."""
    names = {key.to_user_string() for key in context.job_def.asset_layer.selected_asset_keys}
    steps = context.run.step_keys_to_execute
    return names if steps is None else names & set(steps)


def read_partition(context: dg.AssetCheckExecutionContext) -> str:
    """Return the name of the target that this run, and so the check, is for."""
    return context.op_execution_context.partition_key


def launch(
    context: dg.AssetExecutionContext,
    launcher: TorchLauncher,
    workspace: Workspace,
    program: str,
    run: RunFile,
    processes: int,
    device: str,
    python: EnginePython | None = None,
    companions: Sequence[Companion] = (),
) -> JobResult:
    """Write the run file, run `draftworks.programs.{program}` on it with the launcher, and return its report.

    Args:
        python: that of an engine, for programs that run it in their own process.
        companions: jobs that run beside it.

    Raises:
        ConfigError: that interpreter cannot run the programs.
    """
    folder = locate_step_folder(context, workspace)
    job = _make_job(context, workspace, folder, program, run, processes, device, python)
    return launcher.run(context=context, job=job, run_dir=folder, companions=companions)


def make_companion(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    program: str,
    run: RunFile,
    processes: int,
    device: str,
    python: EnginePython | None = None,
    serves: bool = False,
    restarts: int = 0,
    name: str | None = None,
    copies: int = 1,
) -> Companion:
    """Write the run file of a program to run beside another one, with arguments as `launch` and `Companion`; its log is
    its own.

    Args:
        name: of its folder, where several companions run one program; the program by default.
        copies: like jobs that it starts at once, for a launcher that `has_arrays`.
    """
    name = name or program
    folder = locate_step_folder(context, workspace) / name
    job = _make_job(context, workspace, folder, program, run, processes, device, python, name, copies)
    return Companion(job, folder, serves, restarts)


def make_peer(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    name: str,
    program: str,
    run: RunFile,
    processes: int,
    device: str,
    is_own: bool,
) -> PeerJob:
    """Write the run file of one of several jobs that run side by side, with arguments as `launch`.

    Args:
        is_own: whether its files lie in the step's folder, as those of a job that runs alone; else in `name` below it.
    """
    folder = locate_step_folder(context, workspace)
    folder = folder if is_own else folder / name
    return PeerJob(name, _make_job(context, workspace, folder, program, run, processes, device, None), folder)


def locate_step_folder(context: dg.AssetExecutionContext, workspace: Workspace) -> Path:
    """Return the folder of run files, messages and logs of a step's jobs."""
    return workspace.locate_run_folder(context.run.run_id, context.op_execution_context.op_handle.name)


def _make_job(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    folder: Path,
    program: str,
    run: RunFile,
    processes: int,
    device: str,
    python: EnginePython | None,
    role: str = "",
    copies: int = 1,
) -> TorchJob:
    path = run.save(folder / "run.yaml")
    place = workspace.resolve_launcher(context.partition_key, program)
    extra = {} if python is None else python.build_program_environment(folder / "package")
    return TorchJob(
        module=f"draftworks.programs.{program}",
        args=(str(path),),
        nodes=1 if place.kind == LOCAL and place.least_nodes == 1 else place.nodes,
        procs_per_node=processes,
        gpus_per_node=0 if device == "cpu" else processes * run.gpus_per_process,
        env={"HF_HUB_DISABLE_PROGRESS_BARS": "1", **extra},
        python=None if python is None else python.path,
        longest_wait_s=run.longest_wait_s,
        launcher=place,
        identity=identify_job(context.asset_key.to_user_string(), context.partition_key, run, path, role, copies),
        copies=copies,
    )
