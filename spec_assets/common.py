"""What all asset modules share: the decorator, how a result is shown, and how a program is launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.gates import Outcome
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import RunFile
from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.sglang.environment import build_program_environment
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.asset_names import of_strategy
from draftworks.storage.full_disk import explain_full_disk
from draftworks.targets.registry import HELDOUT
from resources.dead_runs import end_with_run_process
from resources.torch_job import TorchJob
from resources.torch_launcher import JobResult, TorchLauncher
from resources.workspace import Workspace
from spec_assets.course import described
from spec_assets.metadata import legible, short_path
from spec_assets.unused import unused_assets

OWNERS = ["team:drafts"]


class NothingToDo(Exception):
    """Raised by an optional asset that a target does not have, with the reason."""


def asset(
    *, group: str, kinds: Iterable[str], code_version: str = "1", optional: bool = False, **options: Any
) -> Callable[..., Any]:
    """`dg.asset` with this project's defaults.

    A DraftworksError becomes a failure with its message and no retry, and the step does not outlive its run's process.

    Args:
        optional: not every target has it: it may raise `NothingToDo`. Then it yields nothing and the run stays green, and
            what depends on it, its checks too, is skipped.
    """

    def decorate(function: Callable[..., dg.MaterializeResult]) -> dg.AssetsDefinition:
        checked = guarded(function)
        return dg.asset(
            group_name=group,
            kinds=set(kinds),
            owners=OWNERS,
            code_version=code_version,
            output_required=not optional,
            **options,
        )(_or_nothing(checked) if optional else checked)

    return decorate


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an asset: its DraftworksErrors become failures, and it ends with the process of the run."""

    @functools.wraps(function)
    def call(context: dg.AssetExecutionContext, *args: Any, **kwargs: Any) -> Any:
        end_with_run_process(context)
        with clear_errors():
            return function(context, *args, **kwargs)

    return call


def _or_nothing(function: Callable[..., dg.MaterializeResult]) -> Callable[..., Any]:
    """A generator, since only that can leave out its output."""

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
def clear_errors() -> Generator[None, None, None]:
    try:
        yield
    except DraftworksError as error:
        raise dg.Failure(description=str(error), allow_retries=False) from None
    except Exception as error:
        full = explain_full_disk(error, Path.cwd())
        if full is None or isinstance(error, (dg.Failure, dg.RetryRequested)):
            raise
        raise dg.Failure(description=str(full), allow_retries=False) from error


def target_of(context: dg.AssetExecutionContext, workspace: Workspace) -> TargetSpec:
    """The target of this step, for the assets that not every target has.

    Raises:
        NothingToDo: this one has not. Our own executor does not come here for it; Dagster's others do.
    """
    target = workspace.registry.load_target(context.partition_key)
    reason = unused_assets(target, workspace.registry).get(context.asset_key.to_user_string())
    if reason is not None:
        raise NothingToDo(reason)
    return target


def eval_names_of(target: TargetSpec) -> list[str]:
    """`heldout` and the named sets of a target."""
    return [HELDOUT, *target.evals]


def draft_of(workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> Artifact:
    """The newest draft, for what is made from one.

    Raises:
        NothingToDo: there is none yet: to measure what exists is no reason to fail for what does not.
    """
    draft = workspace.artifacts.find(of_strategy(strategy.name).draft, target.name)
    if draft is None:
        raise NothingToDo(f"target {target.name} has no {strategy.name} draft yet")
    return draft


@contextmanager
def retried(context: dg.AssetExecutionContext, times: int, delay_s: float = 5.0) -> Generator[None, None, None]:
    """Ask for the step to be tried again after a failure that a retry can mend: a rank that was killed, a pre-emption.

    Not a `RetryPolicy`: with one, Dagster takes a cancelled run for a failed step and tries it again.
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


def obtained(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    identity: dict[str, Any],
    build: Callable[[Path], BuildResult],
    **options: Any,
) -> Artifact:
    """The result of this step's asset for this partition; its code version is part of the identity.

    Options are those of `ArtifactStore.obtain`.
    """
    spec = context.assets_def.get_asset_spec(context.asset_key)
    return workspace.artifacts.obtain(
        context.asset_key.to_user_string(),
        context.partition_key,
        {**identity, "code_version": spec.code_version},
        build,
        **options,
    )


def shown(
    context: dg.AssetExecutionContext,
    artifact: Artifact,
    metadata: Mapping[str, Any],
    checks: Iterable[dg.AssetCheckResult] = (),
) -> dg.MaterializeResult:
    """A published result as Dagster sees it: content version, where it is, what a person wants to know."""
    context.log.info("unchanged, nothing to do" if artifact.hit else f"made in {artifact.seconds:.1f} s")
    checks = [told(context, check) for check in checks]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(artifact.data_version),
        metadata={
            **legible(metadata),
            "cache": "hit" if artifact.hit else "built",
            "identity": artifact.path.name,
            "path": short_path(artifact),
            "seconds_to_build": round(artifact.seconds, 1),
        },
        check_results=checks,
    )


def told(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, check: dg.AssetCheckResult
) -> dg.AssetCheckResult:
    """The result of a check, its failure also in the log: Dagster's own line says only that some check failed."""
    check = check._replace(metadata=legible(check.metadata))
    if not check.passed:
        log = context.log.error if check.severity is dg.AssetCheckSeverity.ERROR else context.log.warning
        name = check.check_name or context.op_execution_context.op_handle.name
        log(f"check {name} failed: {described(check)}")
    return check


def severity_of(outcome: Outcome) -> dg.AssetCheckSeverity:
    """Of a check that fails, by what `gates` of a target says of it."""
    return dg.AssetCheckSeverity.ERROR if outcome == "error" else dg.AssetCheckSeverity.WARN


def checked_partition(context: dg.AssetCheckExecutionContext) -> str:
    """The target whose asset a check looks at: that of the run."""
    return context.op_execution_context.partition_key


def launch(
    context: dg.AssetExecutionContext,
    launcher: TorchLauncher,
    workspace: Workspace,
    program: str,
    run: RunFile,
    processes: int,
    device: str,
    python: Path | None = None,
) -> JobResult:
    """Run `draftworks.programs.{program}` on a run file, wherever the launcher runs things.

    Args:
        python: that of SGLang's environment, for programs that run SGLang in their own process; ConfigError if it cannot.
    """
    folder = workspace.run_folder(context.run.run_id, context.op_execution_context.op_handle.name)
    path = run.save(folder / "run.yaml")
    extra = {} if python is None else build_program_environment(python, folder / "package")
    job = TorchJob(
        module=f"draftworks.programs.{program}",
        args=(str(path),),
        procs_per_node=processes,
        gpus_per_node=0 if device == "cpu" else processes,
        env={"HF_HUB_DISABLE_PROGRESS_BARS": "1", **extra},
        python=python,
        longest_wait_s=run.longest_wait_s,
    )
    return launcher.run(context=context, job=job, run_dir=folder)
