"""The gate before training on features in fp8: drafts trained on a sample both ways, compared by the walk."""

from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import dagster as dg

from draftworks.config.run_files import FeatureSet
from draftworks.preflight.plausible_values import read_verdicts
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import FP8_GATE, RECIPE, TARGET_MODEL, TOKENIZED_TRAIN
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, obtain_result, report_result, require_target
from spec_assets.metadata import format_table
from spec_assets.sample_trainings import READS, SampleTrainings

PASSED = "fp8_loss_is_small"
TOKENS, FEATURES = "tokens", "features"


@asset(
    group="gates",
    kinds=["pytorch"],
    deps=[TARGET_MODEL, RECIPE, TOKENIZED_TRAIN, *READS],
    check_specs=[
        dg.AssetCheckSpec(
            PASSED,
            asset=FP8_GATE,
            description="The upper bound of what drafts lose by features in fp8 is at most gates.fp8_max_loss.",
        )
    ],
    optional=True,
    program="train",
)
def fp8_gate(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """What drafts lose when they are trained on features in fp8, for a target with `capture.storage`: each strategy is
    trained on a sample with plain features and with rounded ones, and the walks are compared.
    """
    target = require_target(context, workspace)
    files, gates = workspace.resolve_target_files(target.name), target.gates
    trainings = SampleTrainings(context, launcher, workspace, target, files, gates.fp8_steps, gates.fp8_seeds)
    comparison = Comparison(trainings, workspace.artifacts.load_current(TOKENIZED_TRAIN, target.name))
    artifact = obtain_result(context, workspace, comparison.run, comparison.identity)
    found = read_verdicts(artifact, target.gates.fp8_max_loss)
    columns = ("strategy", "verdict", "relative loss", "low", "high", "by seed", "prompts")
    rows = [
        (
            name,
            each.verdict,
            *("" if v is None else f"{v:+.4f}" for v in (each.loss, each.low, each.high)),
            ", ".join(f"{v:+.4f}" for v in each.by_seed),
            each.prompts,
        )
        for name, each in found.items()
    ]
    check = dg.AssetCheckResult(
        passed=all(each.verdict == "passed" for each in found.values()),
        check_name=PASSED,
        asset_key=FP8_GATE,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(f"{name}: {each.describe()}" for name, each in found.items()),
    )
    metadata = {
        "losses": format_table(columns, rows),
        "storage": target.capture.storage,
        **dict(artifact.summary["run"]),
    }
    return report_result(context, artifact, metadata, [check])


@dataclass(frozen=True)
class Comparison:
    """The trainings that are compared, and the tokens from which their samples are chosen."""

    trainings: SampleTrainings
    tokens: Artifact

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the figures. The limit is not in it: the same figures are judged by another one."""
        target = self.trainings.target
        chosen = {"storage": target.capture.storage, "samples": target.gates.fp8_samples}
        return {**self.trainings.identify(self.tokens), **chosen}

    def run(self, out: Path) -> BuildResult:
        """Capture the sample, train and measure every draft, and judge. What an interrupted run has measured is kept."""
        from draftworks.evaluation.ladder.relative_loss import SeedPair, judge_relative_loss

        target, found = self.trainings.target, {}
        samples = FeatureSet(tokens=out / TOKENS, features=out / FEATURES)
        chosen = self._choose_sample(samples.tokens)
        self.trainings.capture(samples)
        storages = {"plain": "plain", "fp8": target.capture.storage}
        sets = {way: samples.model_copy(update={"read_as": storage}) for way, storage in storages.items()}
        for name in target.strategies:
            pairs = [SeedPair(walks["plain"], walks["fp8"]) for walks in self.trainings.measure_walks(sets, name, out)]
            found[name] = judge_relative_loss(pairs, target.gates.fp8_max_loss, self.trainings.resampling).to_json()
        for folder in (TOKENS, FEATURES):
            rmtree(out / folder, ignore_errors=True)
        figures = {"samples": chosen, "steps": target.gates.fp8_steps, "seeds": target.gates.fp8_seeds}
        return BuildResult(digest(found), {"strategies": found, "run": figures})

    def _choose_sample(self, tokens: Path) -> int:
        """Write the chosen training samples; return their number."""
        from draftworks.data.tokenized import TokenizedSet, write_tokens

        rows = sorted(TokenizedSet.open(self.tokens.path), key=lambda row: digest(row.sample_id))
        rows = rows[: self.trainings.target.gates.fp8_samples]
        write_tokens(tokens, rows)
        return len(rows)
