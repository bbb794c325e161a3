"""Serving assets: acceptance of an exported draft in a live SGLang server (rung 6), compared with the walk (rung 3)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TOKENS_FOLDER, ServeRun
from draftworks.config.strategies import StrategySpec
from draftworks.errors import ConfigError
from draftworks.evaluation.acceptance_length import NAME, count_own_token, format_change, format_length
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.planning.identities import read_limits
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import EVALUATION_RECIPE, HELDOUT_RESPONSES, TARGET_MODEL, of_strategy
from draftworks.storage.records import ExportIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT
from resources.sglang_server import SGLangServer
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    NothingToDo,
    asset,
    launch,
    obtain_result,
    read_partition,
    report_result,
    require_target,
    translate_errors,
)
from spec_assets.gates import yield_gated
from spec_assets.metadata import format_table

GROUP = "serving"
AGREES_WITH_WALK = "agrees_with_walk"
SERVER = "SGLang"
"""Key of the server in the commands of an export."""


def make_serving_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_serving`, for targets with `evaluation.serving.prompts` above 0."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["sglang"],
        name=names.serving,
        description=f"The exported {strategy.name} draft at work in a live SGLang server: its {NAME}, "
        "from the server's own counters, beside the walk over the same answers.",
        deps=[
            TARGET_MODEL,
            EVALUATION_RECIPE,
            HELDOUT_RESPONSES,
            names.report,
            names.export,
        ],
        optional=True,
        program="serve",
    )
    def serving(
        context: dg.AssetExecutionContext,
        workspace: Workspace,
        launcher: dg.ResourceParam[TorchLauncher],
        sglang: SGLangServer,
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        subject = ServedDraft.of(workspace, strategy, target)
        settings = target.evaluation.serving

        def build(out: Path) -> BuildResult:
            logs = (
                workspace.locate_run_folder(context.run.run_id, context.op_execution_context.op_handle.name) / "server"
            )
            run = subject.build_run(workspace, sglang, out, logs)
            with sglang.log_output_of_server(context, logs):
                job = launch(context, launcher, workspace, "serve", run, processes=1, device=settings.device)
            summary = {**job.report, "log": str(sglang.locate_log(logs))}
            counted = {name: summary[name] for name in ("acceptance", "answers", "same_answers")}
            return BuildResult(digest(counted), summary)

        artifact = obtain_result(context, workspace, subject.to_identity(workspace), build)
        return report_result(context, artifact, describe_serving(artifact))

    return serving


class ServedDraft:
    """An exported draft with the report of its walk, and how it is to be served.

    Attributes:
        format: the export format.
        command: the command line that the export's metadata shows.
    """

    def __init__(self, target: TargetSpec, export: Artifact, report: Artifact, format_name: str) -> None:
        self.target = target
        self.export = export
        self.report = report
        self.format = format_name
        self.command: str = export.summary["formats"][format_name]["commands"][SERVER]

    @classmethod
    def of(cls, workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> "ServedDraft":
        """Return the newest export of a strategy's draft with its report.

        Raises:
            NothingToDo: the draft is not exported or measured yet, or has no export that SGLang loads.
            ConfigError: the requested format was not exported, or export and report are of different drafts.
        """
        settings = target.evaluation.serving
        names = of_strategy(strategy.name)
        export, report = (workspace.artifacts.find(name, target.name) for name in (names.export, names.report))
        if export is None or report is None:
            missing = names.export if export is None else names.report
            raise NothingToDo(f"target {target.name} has no {missing} yet")
        measured, exported = ReportIdentity.of(report), ExportIdentity.of(export)
        if exported.draft != measured.draft_identity:
            raise ConfigError(
                f"target {target.name}: the export is of draft {exported.draft}, the report of draft "
                f"{measured.draft_identity}: expected the same. Run the job train_{strategy.name}"
            )
        answers = workspace.artifacts.load_current(HELDOUT_RESPONSES, target.name).data_version
        if measured.heldout is None or (measured.heldout.answers, measured.limits) != (answers, read_limits(target)):
            raise ConfigError(
                f"target {target.name}: the report is of other held-out answers or limits than there are now, so its walk "
                "is not comparable. Run the job evaluate first"
            )
        formats = [name for name, made in export.summary["formats"].items() if SERVER in made["commands"]]
        if settings.format is None and not formats:
            raise NothingToDo(f"target {target.name} has no {strategy.name} export that {SERVER} loads")
        if settings.format is not None and settings.format not in formats:
            raise ConfigError(
                f"target {target.name}: evaluation.serving.format: expected one of {', '.join(formats) or 'no format'}, in "
                f"which there is an export for {SERVER}, found {settings.format}"
            )
        return cls(target, export, report, settings.format or formats[0])

    def to_identity(self, workspace: Workspace) -> dict[str, Any]:
        return {
            "export": self.export.summary["formats"][self.format]["digest"],
            "format": self.format,
            "command": self.command,
            "report": self.report.path.name,
            "target": workspace.resolve_target_files(self.target.name).digest,
            "serving": self.target.evaluation.serving.to_identity(),
        }

    def build_run(self, workspace: Workspace, sglang: SGLangServer, out: Path, logs: Path) -> ServeRun:
        target, evaluation = self.target, self.target.evaluation
        report = self.report.path / HELDOUT
        return ServeRun(
            out=out,
            target=workspace.resolve_target_files(target.name),
            command=self.command,
            draft=self.export.path / self.format,
            tokens=workspace.artifacts.load_current(HELDOUT_RESPONSES, target.name).path / TOKENS_FOLDER,
            report=report,
            draft_tokens=ReportSummary.load(report).draft_tokens,
            serving=evaluation.serving,
            logs=logs,
            sglang=sglang.spec,
            max_new_tokens=target.responses.max_new_tokens,
            max_length=target.max_length,
            confidence=evaluation.confidence,
            resamples=evaluation.resamples,
        )


def describe_serving(artifact: Artifact) -> dict[str, Any]:
    """Return metadata: both rungs, speed, and the path of the server's log."""
    found, walk = artifact.summary, artifact.summary["walk"]
    accepted = found["acceptance"]
    rows = [
        (
            "live server (6)",
            format_length(accepted["micro"], 3, none=""),
            accepted["passes"],
        ),
        ("server minus walk (3)", format_change(walk["difference"], digits=4), ""),
    ]
    return {
        "rungs": format_table(("rung", NAME, "passes"), rows),
        **({} if accepted["micro"] is None else {"server_acceptance_length": count_own_token(accepted["micro"])}),
        "difference_from_walk": walk["difference"],
        "equal_count_for_count": f"{walk['equal']} of {walk['prompts']} samples",
        "same_answers": f"{found['same_answers']} of {found['answers']}",
        "tokens_per_second": found["tokens_per_second"],
        "concurrency": found["concurrency"],
        "algorithm": found["algorithm"],
        "sglang": found["server"]["version"],
        "measured_on": found["occasion"]["device"],
        "server_log": dg.MetadataValue.path(os.path.relpath(found["log"], artifact.path.parents[3])),
    }


def make_serving_check(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """Return the check `agrees_with_walk`, a warning unless the target makes it a gate."""
    name = of_strategy(strategy.name).serving

    @dg.asset_check(  # pyright: ignore[reportArgumentType] - Dagster takes a generator, its type does not say so
        asset=name,
        name=AGREES_WITH_WALK,
        description="The live server (rung 6) accepts per pass what the walk (rung 3) accepts on the same answers.",
    )
    def agrees_with_walk(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> Iterator[dg.AssetCheckResult]:
        target = read_partition(context)
        with translate_errors():
            result = judge_agreement(workspace.artifacts.load_current(name, target).summary)
            yield from yield_gated(context, workspace.registry.load_target(target), AGREES_WITH_WALK, result)

    return agrees_with_walk


def judge_agreement(summary: dict[str, Any]) -> dg.AssetCheckResult:
    walk = summary["walk"]
    interval = walk["interval"]
    return dg.AssetCheckResult(
        passed=walk["agrees"],
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{walk['difference']:+.3f} accepted tokens per pass ({interval['low']:+.3f} to {interval['high']:+.3f}) "
        f"against the walk, on {walk['prompts']} samples; {walk['equal']} are equal count for count, and "
        f"{summary['same_answers']} of {summary['answers']} answers are the eval set's own",
        metadata={
            "difference": walk["difference"],
            "low": interval["low"],
            "high": interval["high"],
            "allowed": walk["allowed"],
        },
    )
