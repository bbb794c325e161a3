"""Draft assets, one per strategy. A target that does not use a strategy has none of its draft."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from draftworks.config.draft_config import read_draft_config
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.run_files import (
    CHECKPOINTS_FOLDER,
    VOCAB_FILE,
    FeatureSet,
    StoreSpec,
    StreamPlace,
    TargetFiles,
    TrainRun,
)
from draftworks.config.strategies import StrategySpec
from draftworks.evaluation.strategy_metrics import format_rates_by_position, select_strategy_metrics
from draftworks.fleet.draft_staleness import OVERRIDES
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.asset_names import (
    HELDOUT_FEATURES,
    HELDOUT_RESPONSES,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    VOCAB_MAPPING,
    of_strategy,
)
from draftworks.storage.identity import digest
from draftworks.storage.records import DraftIdentity, EvalData
from draftworks.targets.registry import HELDOUT, apply_overrides
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    asset,
    launch,
    obtain_result,
    read_partition,
    report_check,
    report_result,
    require_target,
    retry_on_failure,
    to_severity,
    translate_errors,
)
from spec_assets.draft_streams import describe_stream, open_stream
from spec_assets.evals import locate_feature_set, read_eval_data
from spec_assets.features import GPU_POOL, require_features, select_stream_versions
from spec_assets.metadata import embed_picture, format_bytes, format_table, select_acceptance, shorten_path

GROUP = "drafts"
LOSS_FALLS = "loss_falls"
ENOUGH_STEPS = 20
"""Fewer steps are not judged: warm-up and the noise of single batches decide whether the loss falls."""


class DraftConfig(dg.Config):
    """Overrides of one run; what the registry says is the default."""

    options: dict[str, Any] = Field(
        default_factory=dict, description="Strategy options that differ from the registry's."
    )
    training: dict[str, Any] = Field(
        default_factory=dict, description="Training settings that differ from the registry's."
    )
    start_over: bool = Field(
        default=False, description="Train from the first step, even if this very draft exists or was interrupted."
    )
    retries: int = Field(
        default=10, ge=0, description="Number of automatic restarts of an interrupted training from its checkpoint."
    )


@dataclass(frozen=True)
class DraftInputs:
    """Resolved inputs of a draft.

    Attributes:
        feature_versions: content versions of the streams that this strategy reads, by name, as in `heldout_data`. A
            tap that only another strategy reads is not included, so it does not cause a new training.
    """

    files: TargetFiles
    options: dict[str, Any]
    training: TrainingSpec
    train_tokens: Artifact
    train_features: Artifact
    heldout: FeatureSet
    feature_versions: dict[str, str]
    heldout_data: EvalData
    vocab_mapping: Artifact | None
    start_from: Path | None

    def to_identity(self, strategy: StrategySpec) -> DraftIdentity:
        return DraftIdentity(
            strategy=strategy.name,
            options=strategy.identify_options(
                strategy.parse_options(self.options, where=f"options of {strategy.name}"),
                self.files.hidden_size,
                self.files.num_heads,
            ),
            start_from=None if self.start_from is None else read_draft_config(self.start_from).weights_digest,
            training=self.training.to_identity(),
            target=self.files.digest,
            tokens=self.train_tokens.data_version,
            features=digest(self.feature_versions),
            vocab_mapping=None if self.vocab_mapping is None else self.vocab_mapping.data_version,
            heldout=self.heldout_data,
        )

    def locate_vocab_file(self) -> Path | None:
        """Return the vocabulary mapping's file: that of the draft to start from, if there is one, since its head was
        made for it."""
        if self.vocab_mapping is None:
            return None
        return (self.start_from or self.vocab_mapping.path) / VOCAB_FILE


def resolve_draft_inputs(
    workspace: Workspace, strategy: StrategySpec, target: TargetSpec, config: DraftConfig
) -> DraftInputs:
    """Return the inputs of a draft. Raises ConfigError for unknown options, StoreError for assets that do not exist
    yet."""
    entry = target.strategies[strategy.name]
    chosen = apply_overrides(target.name, strategy, entry, config.options, config.training)
    artifacts: ArtifactStore = workspace.artifacts
    files = workspace.resolve_target_files(target.name)
    options = strategy.parse_options(chosen.options, where=f"options of {strategy.name}")
    streams = strategy.list_features(files.num_layers, options)
    train_features = require_features(workspace, TRAINING_FEATURES, target.name)
    return DraftInputs(
        files=files,
        options=chosen.options,
        training=chosen.training,
        train_tokens=artifacts.load_current(TOKENIZED_TRAIN, target.name),
        train_features=train_features,
        feature_versions=select_stream_versions(train_features, streams),
        heldout=locate_feature_set(workspace, target.name, HELDOUT),
        heldout_data=read_eval_data(workspace, target.name, HELDOUT, streams),
        vocab_mapping=artifacts.load_current(VOCAB_MAPPING, target.name) if strategy.uses_vocab_mapping else None,
        start_from=None if entry.start_from is None else workspace.registry.resolve_path(entry.start_from),
    )


def make_draft_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_draft`."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["pytorch", "safetensors"],
        name=names.draft,
        description=f"A trained draft model. {strategy.description}",
        code_version="2",
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
        pool=GPU_POOL,
    )
    def draft(
        context: dg.AssetExecutionContext,
        config: DraftConfig,
        workspace: Workspace,
        launcher: dg.ResourceParam[TorchLauncher],
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        inputs = resolve_draft_inputs(workspace, strategy, target, config)

        identity = inputs.to_identity(strategy).to_json()

        def build(out: Path) -> BuildResult:
            training = inputs.training
            with open_stream(context, workspace, target, inputs, identity) as stream:
                store = workspace.locate_feature_store(inputs.files)
                run = build_train_run(out, strategy.name, inputs, store, stream.place)
                with retry_on_failure(context, times=config.retries):
                    job = launch(
                        context,
                        launcher,
                        workspace,
                        "train",
                        run,
                        training.processes,
                        training.device,
                        companions=stream.beside,
                    )
                produced = stream.summarize()
            overrides = {"options": config.options, "training": config.training}
            summary = {**job.report, **produced, **({OVERRIDES: overrides} if any(overrides.values()) else {})}
            return BuildResult(summary["weights_digest"], summary, own_digests=(CHECKPOINTS_FOLDER,))

        artifact = obtain_result(
            context,
            workspace,
            identity,
            build,
            # A retry of a training that was to start over continues from that training's own checkpoint.
            start_over=config.start_over and context.retry_number == 0,
            rebuild=config.start_over,
        )
        return report_result(context, artifact, describe_draft(artifact))

    return draft


def build_train_run(
    out: Path, strategy: str, inputs: DraftInputs, store: StoreSpec, stream: StreamPlace | None = None
) -> TrainRun:
    return TrainRun(
        out=out,
        target=inputs.files,
        strategy=strategy,
        options=inputs.options,
        training=inputs.training,
        train=FeatureSet(tokens=inputs.train_tokens.path, features=inputs.train_features.path),
        heldout=inputs.heldout,
        store=store,
        stream=stream,
        vocab_mapping=inputs.locate_vocab_file(),
        start_from=inputs.start_from,
    )


def describe_draft(artifact: Artifact) -> dict[str, Any]:
    """Return metadata of a draft: training figures, held-out evaluation, checkpoints, and curves as a picture."""
    summary = artifact.summary
    figures = (
        "steps",
        "published_step",
        "ended_early",
        "tokens",
        "tokens_per_s",
        "first_loss",
        "last_loss",
        "world_size",
    )
    best = summary["best"]
    return {
        **{name: summary[name] for name in figures},
        **(
            {}
            if best is None
            else {"best_score": best["score"], "best_metric": best["metric"], "best_step": best["step"]}
        ),
        "checkpoints": tabulate_checkpoints(artifact),
        "resume_history": format_table(("from step", "ranks", "started"), map(format_session, summary["sessions"])),
        "peak_memory": format_bytes(summary["peak_rss_bytes"]),
        **select_acceptance(summary["heldout"]),
        **format_rates_by_position(summary["heldout"]),
        **select_strategy_metrics(summary["heldout"]),
        **describe_stream(summary),
        "heldout": dg.MetadataValue.json(summary["heldout"]),
        "curves": embed_picture(artifact.path / "training.png", "loss and acceptance while training"),
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
