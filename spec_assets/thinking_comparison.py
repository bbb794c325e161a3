"""What one draft for both costs a target that is served with thinking on and off: three trainings, compared by the walk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import dagster as dg

from draftworks.config.data import OFF, ON
from draftworks.config.run_files import TOKENS_FOLDER, FeatureSet
from draftworks.evaluation.acceptance_length import format_interval, format_length
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import (
    HELDOUT_RESPONSES,
    RECIPE,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
)
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, obtain_result, report_result, require_target
from spec_assets.metadata import format_table
from spec_assets.sample_trainings import READS, SampleTrainings

SETS = "sets"


@asset(
    group="gates",
    kinds=["pytorch"],
    deps=[TARGET_MODEL, RECIPE, TOKENIZED_TRAIN, *READS],
    optional=True,
    program="train",
)
def thinking_comparison(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """What one draft for thinking on and off costs, for a target with shares of both: each strategy is trained on answers
    of one kind, of the other and of both, with equal tokens and steps, and measured on each kind.
    """
    target = require_target(context, workspace)
    files, settings = workspace.resolve_target_files(target.name), target.comparison
    comparison = Comparison(
        SampleTrainings(context, launcher, workspace, target, files, settings.steps, settings.seeds),
        workspace.artifacts.load_current(TOKENIZED_TRAIN, target.name),
        workspace.artifacts.load_current(HELDOUT_RESPONSES, target.name),
    )
    artifact = obtain_result(context, workspace, comparison.run, comparison.identity)
    return report_result(context, artifact, describe_comparison(artifact))


@dataclass(frozen=True)
class Comparison:
    """The trainings, the tokens from which their sets are chosen, and the answers that they are measured on."""

    trainings: SampleTrainings
    tokens: Artifact
    heldout: Artifact

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.trainings.identify(self.tokens), "max_tokens": self.trainings.target.comparison.tokens}

    def run(self, out: Path) -> BuildResult:
        """Capture the sets, train and measure every draft, and compare. What an interrupted run has measured is kept."""
        from draftworks.data.tokenized import TokenizedSet
        from draftworks.evaluation.report.thinking import (
            TRAININGS,
            compare_trainings,
            list_asked_samples,
            sum_by_prompt,
        )

        sizes, found = self._write_sets(out / SETS), {}
        folders = {training: out / SETS / training for training in TRAININGS}
        sets = {name: FeatureSet(tokens=one / "tokens", features=one / "features") for name, one in folders.items()}
        for samples in sets.values():
            self.trainings.capture(samples)
        asked = list_asked_samples(TokenizedSet.open(self.heldout.path / TOKENS_FOLDER))
        for name in self.trainings.target.strategies:
            measured = list(self.trainings.measure_walks(sets, name, out))
            walks = {way: [sum_by_prompt(one[way], asked) for one in measured] for way in TRAININGS}
            found[name] = [one.to_json() for one in compare_trainings(walks, self.trainings.resampling)]
        rmtree(out / SETS, ignore_errors=True)
        return BuildResult(digest(found), {"strategies": found, "sets": sizes})

    def _write_sets(self, folder: Path) -> dict[str, dict[str, int]]:
        """Write the tokens of each training; return their samples and tokens."""
        from draftworks.data.tokenized import TokenizedSet, choose_equal_sets, write_tokens

        sets = choose_equal_sets(TokenizedSet.open(self.tokens.path), self.trainings.target.comparison.tokens)
        for name, rows in sets.items():
            write_tokens(folder / name / "tokens", rows)
        return {name: {"samples": len(rows), "tokens": sum(map(len, rows))} for name, rows in sets.items()}


def describe_comparison(artifact: Artifact) -> dict[str, Any]:
    """Return two tables by strategy and training: what is accepted of each kind, and what is lost of it."""
    accepted, lost = [], []
    for name, found in artifact.summary["strategies"].items():
        cells = {(one["training"], one["way"]): one for one in found}
        for training in dict.fromkeys(one["training"] for one in found):
            ways = [cells[training, way] for way in (ON, OFF)]
            accepted.append((name, training, *(_format_acceptance(one["acceptance"]) for one in ways)))
            lost.append((name, training, *map(_format_loss, ways)))
    columns = ("strategy", "trained on", "thinking on", "thinking off")
    sizes = [(name, f"{one['samples']:,}", f"{one['tokens']:,}") for name, one in artifact.summary["sets"].items()]
    return {
        "acceptance_length": format_table(columns, accepted),
        "lost": format_table(columns, lost),
        "sets": format_table(("trained on", "samples", "tokens"), sizes),
    }


def _format_acceptance(found: Mapping[str, Any]) -> str:
    if found["micro"] is None:
        return "none"
    return f"{format_length(found['micro'])} ({format_interval(found['low'], found['high'])})"


def _format_loss(found: Mapping[str, Any]) -> str:
    if found["training"] == found["way"]:
        return "compared with"
    if found["loss"] is None:
        return "unknown: nothing is accepted"
    return f"{found['loss']:+.1%} ({found['low']:+.1%} to {found['high']:+.1%})"
