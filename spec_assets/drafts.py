"""Draft assets, one per strategy. A target that does not use a strategy has none of its draft."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.run_files import CHECKPOINTS_FOLDER
from draftworks.config.strategies import StrategySpec
from draftworks.evaluation.strategy_metrics import describe_rates, describe_strategy_metrics, format_rates_by_position
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.asset_names import (
    HELDOUT_FEATURES,
    HELDOUT_RESPONSES,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    VOCAB_MAPPING,
    of_strategy,
)
from draftworks.storage.records import DraftIdentity
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    asset,
    obtain_result,
    read_partition,
    report_check,
    report_result,
    require_target,
    to_severity,
    translate_errors,
)
from spec_assets.draft_inputs import DraftConfig, resolve_draft_inputs
from spec_assets.draft_streams import SHARED_LOCK, describe_stream, locate_streams
from spec_assets.draft_training import DRAFT_CODE_VERSION, DraftTraining, shares_stream, train_drafts
from spec_assets.left_out import describe_left_out
from spec_assets.metadata import embed_picture, format_bytes, format_table, select_acceptance, shorten_path

GROUP = "drafts"
LOSS_FALLS = "loss_falls"
ENOUGH_STEPS = 20
"""Fewer steps are not judged: warm-up and the noise of single batches decide whether the loss falls."""


def make_draft_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_draft`."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["pytorch", "safetensors"],
        name=names.draft,
        description=f"A trained draft model. {strategy.description}",
        code_version=DRAFT_CODE_VERSION,
        deps=[
            TARGET_MODEL,
            names.recipe,
            TOKENIZED_TRAIN,
            TRAINING_FEATURES,
            *([VOCAB_MAPPING] if strategy.uses_vocab_mapping else []),
            HELDOUT_RESPONSES,
            HELDOUT_FEATURES,
        ],
        optional=True,
        program="train",
    )
    def draft(
        context: dg.AssetExecutionContext,
        config: DraftConfig,
        workspace: Workspace,
        launcher: dg.ResourceParam[TorchLauncher],
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        inputs = resolve_draft_inputs(workspace, strategy, target, config)

        def build(out: Path) -> BuildResult:
            return train_drafts(context, workspace, launcher, target, DraftTraining(strategy, config, inputs, out))

        artifact = obtain_result(
            context,
            workspace,
            inputs.to_identity(strategy).to_json(),
            build,
            # A retry of a training that was to start over continues from that training's own checkpoint.
            start_over=config.start_over and context.retry_number == 0,
            rebuild=config.start_over,
            # Another step that trains drafts of this target from one stream may be training this one too.
            lock=locate_streams(workspace, target) / SHARED_LOCK if shares_stream(target, inputs) else None,
        )
        return report_result(context, artifact, describe_draft(artifact))

    return draft


def describe_draft(artifact: Artifact) -> dict[str, Any]:
    """Return metadata of a draft: how good it is, curves as a picture, training figures, checkpoints."""
    summary = artifact.summary
    figures = (
        "first_loss",
        "last_loss",
        "tokens",
        "steps",
        "published_step",
        "ended_early",
        "tokens_per_s",
        "world_size",
    )
    best, rates = summary["best"], describe_rates(DraftIdentity.of(artifact).strategy, summary["heldout"])
    return {
        **select_acceptance(summary["heldout"]),
        **(
            {}
            if best is None
            else {"best_score": best["score"], "best_metric": best["metric"], "best_step": best["step"]}
        ),
        "curves": embed_picture(artifact.path / "training.png", "loss and acceptance while training"),
        **{name: summary[name] for name in figures},
        **format_rates_by_position(summary["heldout"]),
        **describe_strategy_metrics(summary["heldout"]),
        **({"acceptance_rule": rates} if rates else {}),
        **describe_stream(summary),
        **describe_left_out(summary),
        "checkpoints": tabulate_checkpoints(artifact),
        "resume_history": format_table(("from step", "ranks", "started"), map(format_session, summary["sessions"])),
        "peak_memory": format_bytes(summary["peak_rss_bytes"]),
        "heldout": dg.MetadataValue.json(summary["heldout"]),
    }


def tabulate_checkpoints(artifact: Artifact) -> dg.MarkdownMetadataValue:
    """Return a table of the checkpoints that were kept."""
    rows = [
        (c["step"], format_bytes(c["bytes"]), c["ranks"], shorten_path(artifact, CHECKPOINTS_FOLDER, c["name"]).value)
        for c in artifact.summary["checkpoints"]
    ]
    return format_table(("step", "size", "ranks", "folder"), rows)


def format_session(session: dict[str, Any]) -> tuple[Any, ...]:
    started = datetime.fromtimestamp(session["started"], UTC)
    return session["from_step"], session["ranks"], f"{started:%Y-%m-%d %H:%M:%S} UTC"


def make_draft_check(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """Return the check `loss_falls`, as a step of its own: it is skipped when the draft is skipped."""
    name = of_strategy(strategy.name).draft

    @dg.asset_check(asset=name, name=LOSS_FALLS, blocking=True, description="Training loss ends below where it began.")
    def loss_falls(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        target = read_partition(context)
        made = workspace.artifacts.load_current(name, target)
        with translate_errors():
            outcome = workspace.registry.load_target(target).gates.loss_falls
        return report_check(
            context, judge_loss(made.summary, DraftIdentity.of(made).start_from is not None, to_severity(outcome))
        )

    return loss_falls


def judge_loss(
    summary: dict[str, Any], continued: bool, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
) -> dg.AssetCheckResult:
    """Check that the training loss fell.

    A training that starts from another draft (`continued`) gets only a warning: its loss may be low from the start,
    and it never publishes a worse draft."""
    first, last, steps = summary["first_loss"], summary["last_loss"], summary["steps"]
    if steps == 0:
        return _verdict(True, "published as it was at the start: no training step was requested")
    if first is None or last is None:
        return _verdict(False, "no supervised token was trained on: see min_supervised_share and the loss masks")
    course = f"loss went from {first:.3f} to {last:.3f} in {steps} steps"
    if last < first or steps < ENOUGH_STEPS:
        return _verdict(True, course)
    hint = f"{course}. Lower lr, or look at the curves on the draft's materialization"
    return _verdict(False, hint, dg.AssetCheckSeverity.WARN if continued else severity)


def _verdict(
    passed: bool, description: str, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=passed, severity=severity, description=description)
