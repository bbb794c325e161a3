"""The training of a draft, alone or together with other drafts of the run that follow the same stream of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import CHECKPOINTS_FOLDER, TRACKERS_FOLDER
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import OVERRIDES
from draftworks.storage.artifacts import BuildResult, Claim
from draftworks.storage.asset_names import of_strategy
from resources.torch_launcher import JobResult, Outcome, TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import launch, list_selected_assets, make_peer, retry_on_failure
from spec_assets.draft_inputs import DraftConfig, DraftInputs, build_train_run, resolve_draft_inputs
from spec_assets.draft_streams import DraftStream, StreamReader, is_planned, open_stream, remove_streams
from spec_assets.left_out import settle_features

DRAFT_CODE_VERSION = "2"


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
    own: DraftTraining,
) -> BuildResult:
    """Train the step's own draft and return its result; train with it the other drafts that can follow its stream.

    Each of those is published as its own step would, which then finds it. One that fails only says so: its own step
    tries again. If the step's own draft fails, the others are brought to their end first.
    """
    with claim_followers(context, workspace, target, own) as followers:
        drafts = [own, *followers]
        readers = [each.to_reader() for each in drafts]
        with open_stream(context, workspace, target, readers) as stream, retry_on_failure(context, own.config.retries):
            outcomes = _run(context, workspace, launcher, drafts, stream)
            trained = {name: each.report for name, each in outcomes.items() if isinstance(each, JobResult)}
            figures = stream.summarize(list(trained))
            for each in followers:
                _publish(context, workspace, each, outcomes[each.name], stream, figures)
            outcome = outcomes[own.name]
            if isinstance(outcome, dg.Failure):
                raise outcome
        result = own.make_result(workspace, outcome.report, stream, figures)
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
    context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec, own: DraftTraining
) -> Iterator[list[DraftTraining]]:
    """Context with the other drafts of the run that follow the stream of the step's own; nobody else trains them.

    Not among them are drafts that exist, that somebody else trains, and those whose inputs are not made yet.
    """
    followers: list[DraftTraining] = []
    with ExitStack() as held:
        if shares_stream(target, own.inputs):
            for name in target.strategies:
                if name != own.name and of_strategy(name).draft in list_selected_assets(context):
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
