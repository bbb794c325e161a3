"""Reports: what a draft is worth, next to drafts that cost nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import VOCAB_FILE, EvaluateRun
from draftworks.config.strategies import StrategySpec
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.export.names import CARD
from draftworks.fleet.leaderboard import Fleet
from draftworks.fleet.model_card import CardSubject, model_card, page_of
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.asset_names import EVALUATION_RECIPE, TARGET_MODEL, TOKENIZED_TRAIN, of_eval_set, of_strategy
from draftworks.storage.atomic import publish_file
from draftworks.storage.identity import LastHidden, digest
from draftworks.storage.records import DraftIdentity, Limits, ReportIdentity
from draftworks.targets.registry import HELDOUT
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, draft_of, eval_names_of, launch, obtained, shown, target_of
from spec_assets.evals import eval_data, feature_set
from spec_assets.features import GPU_POOL
from spec_assets.metadata import acceptance_figures, picture

GROUP = "reports"
LAST = LastHidden().name


def report_asset(strategy: StrategySpec, evals: Sequence[str]) -> dg.AssetsDefinition:
    """The asset `{strategy}_report`, over `heldout` and those of the named eval sets that a target lists."""
    draft_name = of_strategy(strategy.name).draft
    eval_assets = [asset for name in [HELDOUT, *evals] for asset in of_eval_set(name)[1:]]

    @asset(
        group=GROUP,
        kinds=["pytorch", "pandas"],
        name=of_strategy(strategy.name).report,
        description=f"Acceptance of the {strategy.name} draft on every eval set, rung by rung, beside the same draft "
        "untrained and a bigram table.",
        code_version="3",
        deps=[TARGET_MODEL, EVALUATION_RECIPE, TOKENIZED_TRAIN, draft_name, *eval_assets],
        optional=True,
        pool=GPU_POOL,
    )
    def report(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> dg.MaterializeResult:
        target = target_of(context, workspace)
        subject = ReportSubject.of(workspace, strategy, target)

        def build(out: Path) -> BuildResult:
            training = target.strategies[strategy.name].training
            reports: dict[str, Any] = {}
            for name in eval_names_of(target):
                run = subject.run(workspace, name, out / name)
                job = launch(context, launcher, workspace, "evaluate", run, training.processes, training.device)
                reports[name] = job.report
            subject.publish_card(workspace, out)
            summary = {**reports[HELDOUT], "evals": reports}
            return BuildResult(
                data_version=digest({name: figures(found) for name, found in reports.items()}), summary=summary
            )

        artifact = obtained(context, workspace, subject.identity(workspace).to_json(), build)
        return shown(context, artifact, report_metadata(artifact))

    return report


@dataclass(frozen=True)
class ReportSubject:
    """A draft and what it is measured with, resolved."""

    strategy: StrategySpec
    target: TargetSpec
    draft: Artifact
    train_tokens: Artifact

    @classmethod
    def of(cls, workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> "ReportSubject":
        """Raises NothingToDo where the strategy has no draft yet."""
        draft = draft_of(workspace, strategy, target)
        return cls(
            strategy,
            target,
            draft=draft,
            train_tokens=workspace.artifacts.load_current(TOKENIZED_TRAIN, target.name),
        )

    def streams(self, workspace: Workspace) -> list[str]:
        """What of the captured features is read: the draft's own, and `last` for the agreement of the labels."""
        files, options = workspace.target_files(self.target.name), DraftIdentity.of(self.draft).options
        typed = self.strategy.parse_options(options, where=f"options of {self.draft.path}")
        return list(dict.fromkeys([*self.strategy.list_features(files.num_layers, typed), LAST]))

    def identity(self, workspace: Workspace) -> ReportIdentity:
        streams = self.streams(workspace)
        measured = {name: eval_data(workspace, self.target.name, name, streams) for name in eval_names_of(self.target)}
        return ReportIdentity(
            draft=self.draft.data_version,
            draft_identity=self.draft.path.name,
            heldout=measured.pop(HELDOUT),
            evals=measured,
            evaluation=self.target.evaluation.identity(),
            limits=limits_of(self.target),
            bigram_tokens=self.train_tokens.data_version,
        )

    def run(self, workspace: Workspace, name: str, out: Path) -> EvaluateRun:
        files, training = workspace.target_files(self.target.name), self.target.strategies[self.strategy.name].training
        return EvaluateRun(
            out=out,
            target=files,
            strategy=self.strategy.name,
            options=DraftIdentity.of(self.draft).options,
            draft=self.draft.path,
            train_tokens=self.train_tokens.path,
            heldout=feature_set(workspace, self.target.name, name),
            eval_set=name,
            store=workspace.feature_store(files),
            vocab_mapping=self.draft.path / VOCAB_FILE if self.strategy.uses_vocab_mapping else None,
            evaluation=self.target.evaluation,
            loop_cache=workspace.loop_cache,
            max_new_tokens=self.target.responses.max_new_tokens,
            max_length=self.target.max_length,
            micro_batch_size=training.micro_batch_size,
            device=training.device,
            seed=DraftIdentity.of(self.draft).seed,
        )

    def publish_card(self, workspace: Workspace, out: Path) -> None:
        """The model card, from the reports in `out`."""
        reports = [ReportSummary.load(out / name) for name in eval_names_of(self.target)]
        files, dataset = workspace.target_files(self.target.name), workspace.registry.load_dataset(self.target.dataset)
        with publish_file(out / CARD) as staging:
            changes = changes_of_draft(workspace, self.draft, self.target)
            staging.write_text(model_card(CardSubject(self.draft, reports, files, dataset, changes)), encoding="utf-8")


def limits_of(target: TargetSpec) -> Limits:
    return Limits(target.responses.max_new_tokens, target.max_length)


def changes_of_draft(workspace: Workspace, draft: Artifact, target: TargetSpec) -> tuple[str, ...]:
    """What is not as it was when a draft was trained, in words."""
    fleet = Fleet(workspace.registry, workspace.artifacts, workspace.digests)
    return fleet.changes_of_draft(draft, target, workspace.target_files(target.name))


def report_metadata(artifact: Artifact) -> dict:
    """The held-out report first, then those of the named sets."""
    shown_reports: dict[str, Any] = {}
    for name, report in artifact.summary["evals"].items():
        suffix = "" if name == HELDOUT else f"_{name}"
        shown_reports |= acceptance_figures(report["drafts"]["trained"], suffix)
        folder = artifact.path / name
        shown_reports[f"report{suffix}"] = dg.MetadataValue.md((folder / "report.md").read_text())
        shown_reports[f"acceptance{suffix}"] = picture(folder / "acceptance.png", f"acceptance on {name}")
    shown_reports["model_card"] = dg.MetadataValue.md(page_of((artifact.path / CARD).read_text(encoding="utf-8")))
    return {**shown_reports, **{f"simulated_acc_len_{draft}": score for draft, score in scores(artifact).items()}}


def figures(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured of every draft, without clocks: equal for equal content."""
    return {
        draft: {name: value for name, value in metrics.items() if not name.endswith("speed_up")}
        for draft, metrics in report["drafts"].items()
    }


def scores(artifact: Artifact) -> dict[str, float]:
    """Held-out simulated_acc_len (rung 1) of the draft and of what it is compared with."""
    return {name: metrics["eval/simulated_acc_len"] for name, metrics in artifact.summary["drafts"].items()}
