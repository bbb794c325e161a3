"""Draft assets, one per strategy, and their trainings. A target that does not use a strategy has none of its draft."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import CHECKPOINTS_FOLDER, TRACKERS_FOLDER
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.evaluation.strategy_metrics import describe_rates, describe_strategy_metrics, format_rates_by_position
from draftworks.fleet.staleness import OVERRIDES
from draftworks.planning.identities import DRAFT_CODE_VERSION, DraftInputs
from draftworks.storage.artifacts import Artifact, BuildResult, Claim
from draftworks.storage.names import (
    HELDOUT_FEATURES,
    HELDOUT_RESPONSES,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    VOCAB_MAPPING,
    of_strategy,
)
from draftworks.storage.records import DraftIdentity
from resources.torch_launcher import JobResult, Outcome, TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    asset,
    launch,
    list_selected_assets,
    make_peer,
    obtain_result,
    read_partition,
    report_check,
    report_result,
    require_target,
    retry_on_failure,
    to_severity,
    translate_errors,
)
from spec_assets.draft_inputs import (
    DraftConfig,
    build_train_run,
    describe_left_out,
    resolve_draft_inputs,
    settle_features,
)
from spec_assets.draft_streams import (
    SHARED_LOCK,
    DraftStream,
    StreamReader,
    describe_stream,
    is_planned,
    locate_streams,
    open_stream,
    remove_streams,
)
from spec_assets.metadata import embed_picture, format_bytes, format_table, select_acceptance, shorten_path


@dataclass(frozen=True)
class DraftTraining:
    """One draft to train, and the folder that its files go to.

    Attributes:
        claim: the right to publish it; None for the draft of the step itself, which its asset publishes.
    """

    strategy: StrategySpec
    config: DraftConfig
    inputs: DraftInputs
    out: Path
    claim: Claim | None = None

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def identity(self) -> dict[str, Any]:
        return self.inputs.to_identity(self.strategy).to_json()

    def to_reader(self) -> StreamReader:
        return StreamReader(self.name, self.inputs, self.identity)

    def make_result(
        self, workspace: Workspace, report: Mapping[str, Any], stream: DraftStream, figures: Mapping[str, Any]
    ) -> BuildResult:
        """Return the result of a training from its report, and its stream with the producers' figures."""
        inputs = self.inputs
        changes = settle_features(workspace, inputs.train_features, stream.plan, inputs.feature_versions, report)
        overrides: dict[str, Any] = {"options": self.config.options, "training": self.config.training}
        if self.config.start_from:
            overrides["start_from"] = self.config.start_from
        summary = {**report, **figures, **({OVERRIDES: overrides} if any(overrides.values()) else {})}
        return BuildResult(summary["weights_digest"], summary, (CHECKPOINTS_FOLDER, TRACKERS_FOLDER), changes)


def train_drafts(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    launcher: TorchLauncher,
    target: TargetSpec,
    draft: DraftTraining,
) -> BuildResult:
    """Train the step's draft and return its result; train with it the other drafts that can follow its stream.

    Each of those is published as its own step would, which then finds it. One that fails only says so: its own step
    tries again. If the step's draft fails, the others are brought to their end first.
    """
    with claim_followers(context, workspace, target, draft) as followers:
        drafts = [draft, *followers]
        readers = [training.to_reader() for training in drafts]
        with (
            open_stream(context, workspace, target, readers) as stream,
            retry_on_failure(context, draft.config.retries),
        ):
            outcomes = _run(context, workspace, launcher, drafts, stream)
            trained = {name: each.report for name, each in outcomes.items() if isinstance(each, JobResult)}
            figures = stream.summarize(list(trained))
            for follower in followers:
                _publish(context, workspace, follower, outcomes[follower.name], stream, figures)
            outcome = outcomes[draft.name]
            if isinstance(outcome, dg.Failure):
                raise outcome
        result = draft.make_result(workspace, outcome.report, stream, figures)
        remove_streams(workspace, target, [each for each in readers if each.name in trained])
        return result


def _run(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    launcher: TorchLauncher,
    drafts: Sequence[DraftTraining],
    stream: DraftStream,
) -> Mapping[str, Outcome]:
    """Run the trainings beside the producers of their stream; return how each ended, by the name of its strategy."""
    runs = {}
    for each in drafts:
        store = workspace.locate_feature_store(each.inputs.files)
        place = stream.place_of(each.name)
        runs[each.name] = build_train_run(each.out, each.name, each.inputs, store, place, stream.plan)
    if len(drafts) == 1:
        training = drafts[0].inputs.training
        run, beside = runs[drafts[0].name], stream.beside
        job = launch(context, launcher, workspace, "train", run, training.processes, training.device, companions=beside)
        return {drafts[0].name: job}
    context.log.info(f"from one stream of features are trained: {', '.join(runs)}")
    peers = [
        make_peer(
            context,
            workspace,
            each.name,
            "train",
            runs[each.name],
            each.inputs.training.processes,
            each.inputs.training.device,
            is_own=index == 0,
        )
        for index, each in enumerate(drafts)
    ]
    return launcher.run_together(context=context, peers=peers, companions=stream.beside, on_failure=stream.give_up)


def _publish(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    draft: DraftTraining,
    outcome: Outcome,
    stream: DraftStream,
    figures: Mapping[str, Any],
) -> None:
    asset = of_strategy(draft.name).draft
    if isinstance(outcome, dg.Failure):
        context.log.warning(
            f"{asset} was trained beside and failed; its own step tries again from its checkpoint:\n{outcome.description}"
        )
        return
    assert draft.claim is not None
    made = draft.claim.publish(draft.make_result(workspace, outcome.report, stream, figures))
    context.log.info(f"{asset} was trained beside: {made.path.name}")


@contextmanager
def claim_followers(
    context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec, draft: DraftTraining
) -> Iterator[list[DraftTraining]]:
    """Context with the other drafts of the run that follow the stream of the step's draft; nobody else trains them.

    Not among them are drafts that exist, that somebody else trains, and those whose inputs are not made yet.
    """
    followers: list[DraftTraining] = []
    with ExitStack() as held:
        if shares_stream(target, draft.inputs):
            for name in target.strategies:
                if name != draft.name and of_strategy(name).draft in list_selected_assets(context):
                    follower = _claim(context, workspace, target, resolve_strategy(name), held)
                    followers += [] if follower is None else [follower]
        yield followers


def shares_stream(target: TargetSpec, inputs: DraftInputs) -> bool:
    """Whether other drafts may follow the stream of a draft."""
    return target.streaming is not None and target.streaming.share and is_planned(inputs)


def _claim(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    target: TargetSpec,
    strategy: StrategySpec,
    held: ExitStack,
) -> DraftTraining | None:
    """Return the training of another draft; None, with the reason in the log, if it cannot be trained now."""
    asset = of_strategy(strategy.name).draft
    run_config: dict[str, Any] = dict(context.run.run_config)
    config = DraftConfig(**run_config.get("ops", {}).get(asset, {}).get("config", {}))
    waiting = _list_unmade_inputs(context, asset)
    if waiting or config.start_over:
        reason = f"{', '.join(waiting)} of this run is not made yet" if waiting else "it is to start over"
        context.log.info(f"{asset} is not trained beside: {reason}")
        return None
    try:
        inputs = resolve_draft_inputs(workspace, strategy, target, config)
    except DraftworksError as error:
        context.log.info(f"{asset} is not trained beside: {error}")
        return None
    identity = {**inputs.to_identity(strategy).to_json(), "code_version": DRAFT_CODE_VERSION}
    claim = held.enter_context(workspace.artifacts.claim(asset, target.name, identity))
    if claim is None:
        context.log.info(f"{asset} is not trained beside: it exists, or another run trains it")
        return None
    return DraftTraining(strategy, config, inputs, claim.folder, claim)


def _list_unmade_inputs(context: dg.AssetExecutionContext, asset: str) -> list[str]:
    """Return the inputs of an asset that this run makes and has not made yet."""
    parents = context.job_def.asset_layer.get(dg.AssetKey(asset)).parent_keys
    steps = sorted({key.to_user_string() for key in parents} & list_selected_assets(context))
    done = {
        each.step_key
        for each in context.instance.get_run_step_stats(context.run.run_id, steps)
        if each.status is not None and each.status.name == "SUCCESS"
    }
    return [step for step in steps if step not in done]


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
            build,
            inputs.to_identity(strategy).to_json(),
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
