"""Export assets: a draft in the formats of servers, and the checks of these files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.run_files import ExportRun
from draftworks.config.strategies import StrategySpec
from draftworks.export.conventions import DRAFT_FOLDER, GATE_MEANINGS, READABLE
from draftworks.planning.identities import find_card, locate_feature_set
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import TARGET_MODEL, of_strategy
from draftworks.storage.records import ExportIdentity
from draftworks.targets.registry import HELDOUT
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    asset,
    launch,
    obtain_result,
    publish_result,
    read_partition,
    report_check,
    report_result,
    require_draft,
    require_publishable,
    require_target,
)
from spec_assets.gates import check_export_gates
from spec_assets.metadata import format_bytes, format_table, shorten_path

GROUP = "exports"


def make_export_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_export`. It runs after the report, whose model card it copies beside the weights."""
    names = of_strategy(strategy.name)
    formats = ", ".join(spec.name for spec in strategy.usual_exports)

    @asset(
        group=GROUP,
        kinds=["safetensors"],
        name=names.export,
        description=f"The {strategy.name} draft as servers load it, a folder for each format that can hold it: {formats}.",
        deps=[TARGET_MODEL, names.export_recipe, names.draft, names.report],
        optional=True,
    )
    def export(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        draft = require_draft(workspace, strategy, target)
        files, settings = workspace.resolve_target_files(target.name), target.strategies[strategy.name].export
        check_export_gates(workspace, strategy, target)
        card = find_card(workspace.results, strategy, draft)

        def build(out: Path) -> BuildResult:
            require_publishable(workspace)
            run = ExportRun(out=out, target=files, draft=draft.path, export=settings, card=card)
            if settings.quantises:
                walked = {
                    "heldout": locate_feature_set(workspace.results, target.name, HELDOUT),
                    "store": workspace.locate_feature_store(files),
                    "draft_tokens": target.evaluation.draft_tokens,
                }
                run = run.model_copy(update=walked)
            job = launch(context, launcher, workspace, "export", run, processes=1, device="cpu")
            made = job.report["formats"]
            return BuildResult(digest({name: result["digest"] for name, result in made.items()}), job.report)

        artifact = obtain_result(context, workspace, build)
        for name, reason in artifact.summary["refused"].items():
            context.log.warning(f"not exported as {name}: {reason}")
        published = _publish_if_sound(context, workspace, names.export, artifact)
        return report_result(context, artifact, {**describe_export(artifact), **published})

    return export


def _publish_if_sound(
    context: dg.AssetExecutionContext, workspace: Workspace, name: str, artifact: Artifact
) -> dict[str, Any]:
    """Publish an export unless one of its gates failed."""
    failed = [gate for gate in GATE_MEANINGS if not judge_gate(name, gate, artifact.summary["formats"]).passed]
    if failed and workspace.publication is not None:
        context.log.warning(f"not published: the gates {', '.join(failed)} failed")
        return {}
    return publish_result(context, workspace, artifact)


def describe_export(artifact: Artifact) -> dict[str, Any]:
    """Return metadata of an export: formats with sizes and folders, commands to serve it, and formats that were left
    out."""
    made: dict[str, Any] = artifact.summary["formats"]
    rows = [
        (name, result["dtype"], format_bytes(result["nbytes"]), result["loaders"], shorten_path(artifact, name).value)
        for name, result in made.items()
    ]
    metadata: dict[str, Any] = {
        "formats": format_table(("format", "dtype", "size", "loaded by", "folder"), rows),
        "serving": dg.MetadataValue.md("\n\n".join(_format_serve_commands(artifact))),
        "weights_digest": artifact.summary["weights_digest"],
        "model_card": ExportIdentity.of(artifact).card is not None,
    }
    for name, result in made.items():
        if "quantised" in result:
            walked = result["quantised"]
            metadata |= {f"{name}_acceptance_length": walked["length"], f"{name}_kept": walked["kept"]}
    refused = artifact.summary["refused"]
    return metadata | ({"left_out": format_table(("format", "why"), refused.items())} if refused else {})


def _format_serve_commands(artifact: Artifact) -> Iterator[str]:
    for name, result in artifact.summary["formats"].items():
        for server, command in result["commands"].items():
            yield f"{server} (`{name}`):\n\n```\n{command.replace(DRAFT_FOLDER, str(artifact.path / name))}\n```"


def make_export_checks(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """Return one step with a check for each gate over all formats. It is skipped when the export is skipped."""
    name = of_strategy(strategy.name).export
    specs = [
        dg.AssetCheckSpec(gate, asset=name, blocking=True, description=meaning)
        for gate, meaning in GATE_MEANINGS.items()
    ]

    @dg.multi_asset_check(name=f"{name}_gates", specs=specs)
    def gates(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> Iterator[dg.AssetCheckResult]:
        made = workspace.artifacts.load_current(name, read_partition(context)).summary["formats"]
        for gate in GATE_MEANINGS:
            yield report_check(context, judge_gate(name, gate, made))

    return gates


def judge_gate(asset_name: str, gate: str, made: dict[str, Any]) -> dg.AssetCheckResult:
    """Return the result of one gate over all formats. It fails if nothing was exported, or if files could not be
    read, since then no other gate was checked."""
    found = {name: _gate_of(result, gate) for name, result in made.items()}
    failed = {name: one for name, one in found.items() if not one["passed"]}
    described = failed or found
    figures = {f"{name}_{key}": value for name, one in found.items() for key, value in one["figures"].items()}
    return dg.AssetCheckResult(
        asset_key=asset_name,
        check_name=gate,
        passed=bool(found) and not failed,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(f"{name}: {one['description']}" for name, one in described.items())
        or "nothing was exported",
        metadata={key: dg.MetadataValue.json(v) if isinstance(v, list) else v for key, v in figures.items()},
    )


def _gate_of(result: dict[str, Any], gate: str) -> dict[str, Any]:
    for one in result["gates"]:
        if one["name"] == gate:
            return one
    return {"passed": False, "description": f"not checked: the gate `{READABLE}` failed", "figures": {}}
