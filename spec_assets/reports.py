"""Report assets: acceptance of each draft on the eval sets, beside baselines."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.data import OFF, ON, AnswersSampling
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import VOCAB_FILE, EvaluateRun
from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.evaluation.acceptance_length import count_own_token
from draftworks.evaluation.report.summary import TRAINED, ReportSummary
from draftworks.export.conventions import CARD
from draftworks.fleet.leaderboard import Fleet
from draftworks.fleet.model_card import CardSubject, model_card, strip_front_matter
from draftworks.fleet.staleness import is_measured_on
from draftworks.planning.identities import REPORT_CODE_VERSION, identify_report, list_eval_names, locate_feature_set
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.files import publish_file
from draftworks.storage.identity import digest
from draftworks.storage.names import EVALUATION_RECIPE, TARGET_MODEL, TOKENIZED_TRAIN, of_eval_set, of_strategy
from draftworks.storage.records import DraftIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import (
    asset,
    launch,
    obtain_result,
    publish_result,
    report_result,
    require_draft,
    require_publishable,
    require_target,
)
from spec_assets.evals import EvalUsers, depend_on_eval_sets, read_answers_identity
from spec_assets.metadata import SIMULATED, WALK, embed_picture, select_acceptance, tabulate_sampled

GROUP = "reports"


def make_report_asset(strategy: StrategySpec, evals: EvalUsers) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_report`, over `heldout` and those of the named eval sets that a target lists.

    Args:
        evals: targets by the eval set that they list.
    """
    draft_name = of_strategy(strategy.name).draft
    eval_assets = [*of_eval_set(HELDOUT)[1:], *depend_on_eval_sets(evals, lambda names: names[1:])]

    @asset(
        group=GROUP,
        kinds=["pytorch", "pandas"],
        name=of_strategy(strategy.name).report,
        description=f"Acceptance of the {strategy.name} draft on every eval set, rung by rung, beside the same draft "
        "untrained and what costs nothing: no draft, bigrams, prompt lookup, suffix decoding.",
        code_version=REPORT_CODE_VERSION,
        deps=[TARGET_MODEL, EVALUATION_RECIPE, TOKENIZED_TRAIN, draft_name, *eval_assets],
        optional=True,
        program="evaluate",
    )
    def report(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        newest = ReportSubject.of(workspace, strategy, target)

        def build(subject: ReportSubject, out: Path) -> BuildResult:
            require_publishable(workspace)
            training = target.strategies[strategy.name].training
            reports: dict[str, Any] = {}
            for name in list_eval_names(target):
                run = subject.build_run(workspace, name, out / name)
                job = launch(context, launcher, workspace, "evaluate", run, training.processes, training.device)
                reports[name] = job.report
            subject.publish_card(workspace, out)
            summary = {**reports[HELDOUT], "evals": reports}
            return BuildResult(
                data_version=digest({name: drop_speeds(found) for name, found in reports.items()}), summary=summary
            )

        served = find_unmeasured_served(workspace, newest)
        if served is not None:
            context.log.info(f"draft {served.draft.path.name} is in service and not the newest one: measured too")
            measure = functools.partial(build, served)
            try:
                obtain_result(context, workspace, measure, served.to_identity(workspace).to_json())
            except (dg.Failure, DraftworksError) as error:  # it may be of other shapes than the target has now
                context.log.warning(f"the draft in service could not be measured: {error}")
        artifact = obtain_result(context, workspace, functools.partial(build, newest))
        published = publish_result(context, workspace, artifact)
        slices = describe_weighted_slices(workspace, strategy, artifact)
        return report_result(context, artifact, {**describe_report(artifact, strategy.name), **slices, **published})

    return report


@dataclass(frozen=True)
class ReportSubject:
    """A draft with what its report is made from."""

    strategy: StrategySpec
    target: TargetSpec
    draft: Artifact
    train_tokens: Artifact

    @classmethod
    def of(cls, workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> "ReportSubject":
        """Return the subject for the newest draft. Raises NothingToDo if the strategy has none yet."""
        draft = require_draft(workspace, strategy, target)
        return cls(
            strategy,
            target,
            draft=draft,
            train_tokens=workspace.artifacts.load_current(TOKENIZED_TRAIN, target.name),
        )

    def to_identity(self, workspace: Workspace) -> ReportIdentity:
        return identify_report(workspace.results, self.strategy, self.target, self.draft, self.train_tokens)

    def build_run(self, workspace: Workspace, name: str, out: Path) -> EvaluateRun:
        files, training = (
            workspace.resolve_target_files(self.target.name),
            self.target.strategies[self.strategy.name].training,
        )
        answers = read_answers_identity(workspace, self.target.name, name)
        sampling = answers.find_sampling_of(files.digest)
        return EvaluateRun(
            out=out,
            target=files,
            strategy=self.strategy.name,
            options=DraftIdentity.of(self.draft).options,
            draft=self.draft.path,
            train_tokens=self.train_tokens.path,
            heldout=locate_feature_set(workspace.results, self.target.name, name),
            eval_set=name,
            greedy_answers=answers.is_greedy_of(files.digest),
            answers=None if sampling is None else AnswersSampling(**sampling),
            store=workspace.locate_feature_store(files),
            vocab_mapping=self.draft.path / VOCAB_FILE if self.strategy.uses_vocab_mapping else None,
            evaluation=self.target.evaluation,
            loop_cache=workspace.loop_cache,
            rival_cache=workspace.rival_cache,
            max_new_tokens=self.target.responses.max_new_tokens,
            max_length=self.target.max_length,
            micro_batch_size=training.micro_batch_size,
            device=training.device,
            seed=DraftIdentity.of(self.draft).seed,
        )

    def publish_card(self, workspace: Workspace, out: Path) -> None:
        """Write the model card from the reports in `out`."""
        reports = [ReportSummary.load(out / name) for name in list_eval_names(self.target)]
        files, dataset = (
            workspace.resolve_target_files(self.target.name),
            workspace.registry.load_dataset(self.target.dataset),
        )
        with publish_file(out / CARD) as staging:
            changes = list_draft_changes(workspace, self.draft, self.target)
            staging.write_text(model_card(CardSubject(self.draft, reports, files, dataset, changes)), encoding="utf-8")


def find_unmeasured_served(workspace: Workspace, newest: ReportSubject) -> ReportSubject | None:
    """Return the draft in service of a target with `decision`, if it has to be measured beside the newest draft.

    None if it is the newest one, has a report on the eval data of today, or is not there any more.
    """
    artifacts, target, names = workspace.artifacts, newest.target, of_strategy(newest.strategy.name)
    if target.decision is None:
        return None
    from draftworks.service.register import ServiceRegister

    record = ServiceRegister(artifacts.root, target.name, newest.strategy.name).find()
    if record is None or record.draft.digest == newest.draft.path.name:
        return None
    served = record.draft.digest
    drafts = artifacts.list_all(names.draft, target.name)
    draft = next((each for each in drafts if each.path.name == served), None)
    reports = artifacts.list_all(names.report, target.name)
    report = next((each for each in reports if ReportIdentity.of(each).draft_identity == served), None)
    if draft is None or (report is not None and _is_current(artifacts, target, report)):
        return None
    return replace(newest, draft=draft)


def _is_current(artifacts: ArtifactStore, target: TargetSpec, report: Artifact) -> bool:
    """Whether a report is about every eval set as it is now."""
    names = {name: of_eval_set(name) for name in list_eval_names(target)}
    return all(
        is_measured_on(
            report, name, artifacts.find(each.responses, target.name), artifacts.find(each.features, target.name)
        )
        for name, each in names.items()
    )


def list_draft_changes(workspace: Workspace, draft: Artifact, target: TargetSpec) -> tuple[str, ...]:
    """Return, in words, what has changed since a draft was trained."""
    fleet = Fleet(workspace.registry, workspace.artifacts, workspace.digests)
    return fleet.list_draft_changes(draft, target, workspace.resolve_target_files(target.name))


def describe_report(artifact: Artifact, strategy: str) -> dict:
    """Return metadata of a report: the held-out set first, then the other eval sets."""
    metadata: dict[str, Any] = {}
    for name, report in artifact.summary["evals"].items():
        suffix = "" if name == HELDOUT else f"_{name}"
        metadata |= select_acceptance(report["drafts"]["trained"], suffix)
        metadata |= tabulate_sampled(strategy, report["drafts"]["trained"], suffix)
        for way in (ON, OFF) if "thinking" in report else ():
            accepted = report["thinking"][way]["micro"]
            length = None if accepted is None else count_own_token(accepted)
            metadata[f"walk_acceptance_length_thinking_{way}{suffix}"] = length
        folder = artifact.path / name
        metadata[f"report{suffix}"] = dg.MetadataValue.md((folder / "report.md").read_text())
        metadata[f"acceptance{suffix}"] = embed_picture(folder / "acceptance.png", f"acceptance on {name}")
    metadata["model_card"] = dg.MetadataValue.md(strip_front_matter((artifact.path / CARD).read_text(encoding="utf-8")))
    for rung, metric in (("walk", WALK), ("simulated", SIMULATED)):
        others = {draft: score for draft, score in read_scores(artifact, metric).items() if draft != TRAINED}
        metadata |= {f"{rung}_acceptance_length_{draft}": count_own_token(each) for draft, each in others.items()}
    return metadata


def describe_weighted_slices(workspace: Workspace, strategy: StrategySpec, artifact: Artifact) -> dict[str, Any]:
    """Return whether weights of slices have helped; {} for a draft that was trained without."""
    if workspace.registry.load_target(artifact.target).mix is None:
        return {}
    from draftworks.evaluation.report.pages import render_table
    from draftworks.fleet.slice_history import SliceHistory, summarize_weighted

    try:
        found = SliceHistory(workspace.artifacts, artifact.target, strategy.name).find_weighted(artifact)
    except DraftworksError as error:
        return {"weighted_slices": dg.MetadataValue.md(f"Not compared: {error}")}
    if found is None:
        return {}
    table = render_table([one.to_row() for one in found.changes])
    return {"weighted_slices": dg.MetadataValue.md(f"{summarize_weighted(found)}\n\n{table}")}


def drop_speeds(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of every draft without measured speeds, which differ between equal runs."""
    return {
        draft: {name: value for name, value in metrics.items() if not name.endswith("speed_up")}
        for draft, metrics in report["drafts"].items()
    }


def read_scores(artifact: Artifact, metric: str) -> dict[str, float]:
    """Return a held-out metric of the trained draft and of all beside it, by name, where it was measured."""
    drafts = artifact.summary["drafts"].items()
    return {name: metrics[metric] for name, metrics in drafts if metrics.get(metric) is not None}
