"""Serving assets: acceptance of an exported draft in live servers (rung 6), compared with the walk (rung 3)."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.decoding import Decoding, find_server_rule
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TOKENS_FOLDER, DraftServing, ServeRun
from draftworks.config.service import ServingEngine
from draftworks.config.strategies import StrategySpec
from draftworks.errors import ConfigError
from draftworks.evaluation.acceptance_length import NAME, count_own_token, format_change, format_length
from draftworks.evaluation.report.served import ENGINES, list_served, name_engine
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.export.conventions import SERVER_COMMANDS
from draftworks.planning.identities import read_limits
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import EVALUATION_RECIPE, HELDOUT_RESPONSES, TARGET_MODEL, of_strategy
from draftworks.storage.records import ExportIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT
from resources.engine_servers import EngineServer, SGLangServer, VLLMServer
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


@dataclass(frozen=True)
class Engines:
    """Settings of the servers that the program starts."""

    sglang: SGLangServer
    vllm: VLLMServer

    def of(self, engine: ServingEngine) -> EngineServer:
        return self.sglang if engine == "sglang" else self.vllm


def make_serving_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_serving`, for targets with `evaluation.serving.prompts` above 0."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["sglang", "vllm"],
        name=names.serving,
        description=f"The exported {strategy.name} draft at work in live servers (SGLang, vLLM): its {NAME}, "
        "from the servers' own counters, beside the walk over the same answers.",
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
        vllm: VLLMServer,
    ) -> dg.MaterializeResult:
        target, engines = require_target(context, workspace), Engines(sglang, vllm)
        subject = ServedDraft.of(workspace, strategy, target)
        settings = target.evaluation.serving

        def build(out: Path) -> BuildResult:
            logs = (
                workspace.locate_run_folder(context.run.run_id, context.op_execution_context.op_handle.name) / "server"
            )
            run = subject.build_run(workspace, engines, out, logs)
            with ExitStack() as stack:
                for served in subject.servings:
                    stack.enter_context(engines.of(served.engine).log_output_of_server(context, logs))
                job = launch(context, launcher, workspace, "serve", run, processes=1, device=settings.device)
            first, *others = [
                {**found, "log": str(engines.of(one.engine).locate_log(logs))}
                for one, found in zip(subject.servings, list_served(job.report), strict=True)
            ]
            counted = [
                {name: found[name] for name in ("acceptance", "answers", "same_answers")} for found in (first, *others)
            ]
            summary = {**first, **({"others": others} if others else {})}
            return BuildResult(digest(counted[0] if not others else counted), summary)

        artifact = obtain_result(context, workspace, build, subject.to_identity(workspace))
        return report_result(context, artifact, describe_serving(artifact))

    return serving


class ServedDraft:
    """An exported draft with the report of its walk, and how it is to be served.

    Attributes:
        servings: of each engine that is asked for and loads one of the exported formats: the format's folder and command.
    """

    def __init__(self, target: TargetSpec, export: Artifact, report: Artifact, servings: list[DraftServing]) -> None:
        self.target = target
        self.export = export
        self.report = report
        self.servings = servings

    @classmethod
    def of(cls, workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> "ServedDraft":
        """Return the newest export of a strategy's draft with its report.

        Raises:
            NothingToDo: the draft is not exported or measured yet, or has no export that the engines load.
            ConfigError: the requested format was not exported, or export and report are of different drafts.
        """
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
        return cls(target, export, report, _choose_servings(target, strategy, export))

    def to_identity(self, workspace: Workspace) -> dict[str, Any]:
        first, *others = [
            {
                "export": self.export.summary["formats"][one.draft.name]["digest"],
                "format": one.draft.name,
                "command": one.command,
            }
            for one in self.servings
        ]
        sampled = [list(one.decodings) for one in self.servings]
        return {
            **first,
            "report": self.report.path.name,
            "target": workspace.resolve_target_files(self.target.name).digest,
            "serving": self.target.evaluation.serving.to_identity(),
            **({"others": others} if others else {}),
            **({"sampled": sampled} if any(sampled) else {}),
        }

    def build_run(self, workspace: Workspace, engines: Engines, out: Path, logs: Path) -> ServeRun:
        target, evaluation = self.target, self.target.evaluation
        report = self.report.path / HELDOUT
        first, *others = self.servings
        return ServeRun(
            **dict(first),
            others=others,
            out=out,
            target=workspace.resolve_target_files(target.name),
            tokens=workspace.artifacts.load_current(HELDOUT_RESPONSES, target.name).path / TOKENS_FOLDER,
            report=report,
            draft_tokens=ReportSummary.load(report).draft_tokens,
            serving=evaluation.serving,
            logs=logs,
            sglang=engines.sglang.spec,
            vllm=engines.vllm.spec,
            max_new_tokens=target.responses.max_new_tokens,
            max_length=target.max_length,
            confidence=evaluation.confidence,
            resamples=evaluation.resamples,
        )


def _choose_servings(target: TargetSpec, strategy: StrategySpec, export: Artifact) -> list[DraftServing]:
    """Return how each engine that is asked for serves a draft, in the order of the entry; engines that load none are left out.

    Raises:
        NothingToDo: no engine loads an exported format.
        ConfigError: no engine loads the requested format.
    """
    settings, formats = target.evaluation.serving, export.summary["formats"]
    loaded: dict[ServingEngine, list[str]] = {
        engine: [name for name, made in formats.items() if SERVER_COMMANDS[engine] in made["commands"]]
        for engine in settings.engines
    }
    known = sorted({name for names in loaded.values() for name in names})
    servers = " or ".join(ENGINES[engine] for engine in settings.engines)
    if settings.format is None and not known:
        raise NothingToDo(f"target {target.name} has no {strategy.name} export that {servers} loads")
    if settings.format is not None and settings.format not in known:
        raise ConfigError(
            f"target {target.name}: evaluation.serving.format: expected one of {', '.join(known) or 'no format'}, in "
            f"which there is an export for {servers}, found {settings.format}"
        )
    loop = target.evaluation.loop
    return [
        DraftServing(
            engine=engine,
            url=settings.urls.get(engine),
            command=formats[name]["commands"][SERVER_COMMANDS[engine]],
            draft=export.path / name,
            decodings=[
                Decoding(
                    degrees, find_server_rule(engine, strategy.name, settings.server.args), loop.top_k, loop.top_p
                ).suffix
                for degrees in settings.temperatures
            ],
        )
        for engine, names in loaded.items()
        for name in sorted(names, key=lambda each: each != settings.format)[:1]
    ]


def describe_serving(artifact: Artifact) -> dict[str, Any]:
    """Return metadata: the rungs of each server side by side, and of the first its speed and the path of its log."""
    found, walk = artifact.summary, artifact.summary["walk"]
    accepted = found["acceptance"]
    rows = [row for one in list_served(found) for row in _list_rows(one)]
    return {
        "rungs": format_table(("rung", NAME, "passes"), rows),
        **({} if accepted["micro"] is None else {"server_acceptance_length": count_own_token(accepted["micro"])}),
        "difference_from_walk": walk["difference"],
        "equal_count_for_count": f"{walk['equal']} of {walk['prompts']} samples",
        "same_answers": f"{found['same_answers']} of {found['answers']}",
        "tokens_per_second": found["tokens_per_second"],
        "concurrency": found["concurrency"],
        "algorithm": found["algorithm"],
        "servers": ", ".join(f"{name_engine(one)} {one['server']['version']}" for one in list_served(found)),
        "measured_on": found["occasion"]["device"],
        "server_log": dg.MetadataValue.path(os.path.relpath(found["log"], artifact.path.parents[3])),
    }


def _list_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the rows of a server: its rung, and what it differs by, for greedy and for sampled answers."""
    name, accepted = name_engine(found), found["acceptance"]
    yield f"live server (6), {name}", format_length(accepted["micro"], 3, none=""), accepted["passes"]
    yield f"{name} minus walk (3)", format_change(found["walk"]["difference"], digits=4), ""
    for one in found.get("sampled", ()):
        decoding, loop = Decoding.from_json(one["decoding"]), one["loop"]
        length = format_length(one["acceptance"]["micro"], 3, none="")
        yield f"{name}, {decoding.describe()}, {decoding.rule}", length, one["acceptance"]["passes"]
        if loop is not None:
            yield f"{name} minus real decoding (4)", format_change(loop["difference"], digits=4), ""


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
    """Return whether every server agrees with the walk; the figures are those of the first that does not, or of the first."""
    served = list_served(summary)
    shown = next((one for one in served if not one["walk"]["agrees"]), served[0])
    walk, interval = shown["walk"], shown["walk"]["interval"]
    return dg.AssetCheckResult(
        passed=all(one["walk"]["agrees"] for one in served),
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{name_engine(shown)}: {walk['difference']:+.3f} accepted tokens per pass ({interval['low']:+.3f} to "
        f"{interval['high']:+.3f}) against the walk, on {walk['prompts']} samples; {walk['equal']} are equal count for count, "
        f"and {shown['same_answers']} of {shown['answers']} answers are the eval set's own",
        metadata={
            "difference": walk["difference"],
            "low": interval["low"],
            "high": interval["high"],
            "allowed": walk["allowed"],
        },
    )
