"""Reports: what a draft is worth, next to drafts that cost nothing."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from draftworks.artifacts import Artifact, Built
from draftworks.identity import digest
from draftworks.runs import TOKENS_FOLDER, VOCAB_FILE, EvaluateRun, FeatureSet
from draftworks.strategies import StrategySpec
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, checked_partition, launch, obtained, shown, told
from spec_assets.features import GPU_POOL
from spec_assets.metadata import picture

GROUP = "reports"
BEATS_BASELINES = "beats_baselines"


def report_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """The asset `{strategy}_report`."""
    name = f"{strategy.name}_report"
    draft_name = f"{strategy.name}_draft"

    @asset(
        group=GROUP,
        kinds=["pytorch", "pandas"],
        name=name,
        description=f"Held-out acceptance of the {strategy.name} draft, of the same draft untrained and of a bigram table.",
        deps=["target_model", "recipe", "tokenized_train", "vocab_mapping", "heldout_responses"]
        + ["heldout_eval_features", draft_name],
        output_required=False,
        pool=GPU_POOL,
    )
    def report(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> Iterator[dg.MaterializeResult]:
        target = workspace.registry.target(context.partition_key)
        if strategy.name not in target.strategies:
            context.log.info(f"target {target.name} does not use {strategy.name}: nothing to do")
            return
        artifacts = workspace.artifacts
        heldout_tokens = artifacts.current("heldout_responses", target.name)
        draft = artifacts.current(draft_name, target.name)
        heldout = artifacts.current("heldout_eval_features", target.name)
        train_tokens = artifacts.current("tokenized_train", target.name)
        vocab = artifacts.current("vocab_mapping", target.name) if strategy.uses_vocab_mapping else None
        training = target.strategies[strategy.name].training

        def build(out: Path) -> Built:
            run = EvaluateRun(
                out=out,
                target=workspace.target_files(target.name),
                strategy=strategy.name,
                options=draft.identity["options"],
                draft=draft.path,
                train_tokens=train_tokens.path,
                heldout=FeatureSet(tokens=heldout_tokens.path / TOKENS_FOLDER, features=heldout.path),
                store=workspace.feature_store(target.name),
                vocab_mapping=None if vocab is None else vocab.path / VOCAB_FILE,
                micro_batch_size=training.micro_batch_size,
                device=training.device,
                seed=draft.identity["training"]["seed"],
            )
            job = launch(context, launcher, workspace, "evaluate", run, training.processes, training.device)
            return Built(data_version=digest(job.report["drafts"]), summary=job.report)

        identity = {
            "draft": draft.data_version,
            "heldout": [heldout_tokens.data_version, heldout.data_version],
            "bigram_tokens": train_tokens.data_version,
        }
        artifact = obtained(context, workspace, identity, build)
        yield shown(context, artifact, report_metadata(artifact))

    return report


def report_metadata(artifact: Artifact) -> dict:
    return {
        "table": dg.MetadataValue.md((artifact.path / "report.md").read_text()),
        "acceptance": picture(artifact.path / "acceptance.png", "acceptance per draft position"),
        **{f"simulated_acc_len_{draft}": score for draft, score in scores(artifact).items()},
    }


def scores(artifact: Artifact) -> dict[str, float]:
    """Held-out simulated_acc_len (rung 1) of the draft and of what it is compared with."""
    return {name: metrics["eval/simulated_acc_len"] for name, metrics in artifact.summary["drafts"].items()}


def report_check(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """A warning, not a gate: a draft in the making may lose to a table, and its report is still worth reading."""
    name = f"{strategy.name}_report"

    @dg.asset_check(
        asset=name,
        name=BEATS_BASELINES,
        description="The draft accepts more than a bigram table and than itself untrained.",
    )
    def beats_baselines(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        found = scores(workspace.artifacts.current(name, checked_partition(context)))
        baselines = [score for draft, score in found.items() if draft != "trained"]
        better = bool(found["trained"] > max(baselines))
        return told(context, dg.AssetCheckResult(passed=better, severity=dg.AssetCheckSeverity.WARN, metadata=found))

    return beats_baselines
