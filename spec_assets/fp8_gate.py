"""The gate before training on features in fp8: drafts trained on a sample both ways, compared by the walk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.run_files import VOCAB_FILE, CaptureRun, EvaluateRun, FeatureSet, TargetFiles, TrainRun
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.config.trackers import TrackersSpec
from draftworks.preflight.compatibility import collect_taps
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.asset_names import (
    FP8_GATE,
    HELDOUT_FEATURES,
    HELDOUT_RESPONSES,
    RECIPE,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
    VOCAB_MAPPING,
)
from draftworks.storage.identity import digest
from draftworks.targets.registry import HELDOUT
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, launch, obtain_result, report_result, require_target
from spec_assets.evals import locate_feature_set, read_eval_data
from spec_assets.fp8_verdict import read_verdicts
from spec_assets.metadata import format_table
from spec_assets.workers import launch_workers

WAYS = ("plain", "fp8")
PASSED = "fp8_loss_is_small"
TOKENS, FEATURES = "tokens", "features"


@asset(
    group="gates",
    kinds=["pytorch"],
    deps=[TARGET_MODEL, RECIPE, TOKENIZED_TRAIN, VOCAB_MAPPING, HELDOUT_RESPONSES, HELDOUT_FEATURES],
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
    comparison = Comparison.of(workspace, target)

    def build(out: Path) -> BuildResult:
        return comparison.run(context, launcher, out)

    artifact = obtain_result(context, workspace, comparison.identity, build)
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
    """The trainings that are compared, with what they are made from."""

    workspace: Workspace
    target: TargetSpec
    files: TargetFiles
    tokens: Artifact
    strategies: Mapping[str, StrategySpec]

    @classmethod
    def of(cls, workspace: Workspace, target: TargetSpec) -> "Comparison":
        files = workspace.resolve_target_files(target.name)
        tokens = workspace.artifacts.load_current(TOKENIZED_TRAIN, target.name)
        return cls(workspace, target, files, tokens, {name: resolve_strategy(name) for name in target.strategies})

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the figures. The limit is not in it: the same figures are judged by another one."""
        gates = self.target.gates
        return {
            "target": self.files.digest,
            "storage": self.target.capture.storage,
            "tokens": self.tokens.data_version,
            "capture": self.target.capture.as_plain().to_identity(),
            "samples": gates.fp8_samples,
            "strategies": {name: self._identify(name, each) for name, each in self.strategies.items()},
            "evaluation": self.target.evaluation.to_identity(),
        }

    def run(self, context: dg.AssetExecutionContext, launcher: TorchLauncher, out: Path) -> BuildResult:
        """Capture the sample, train and measure every draft, and judge. What an interrupted run has measured is kept."""
        from draftworks.evaluation.ladder.relative_loss import SeedPair, judge_relative_loss
        from draftworks.evaluation.ladder.statistics import Resampling
        from draftworks.evaluation.report.walk_pairs import read_walk

        chosen = self._capture_sample(context, launcher, out)
        evaluation, found = self.target.evaluation, {}
        for name in self.strategies:
            pairs = []
            for seed in self._list_seeds(name):
                folders = [out / name / f"seed-{seed}-{way}" for way in WAYS]
                for way, folder in zip(WAYS, folders, strict=True):
                    self._train_and_measure(context, launcher, out, folder, name, seed, way)
                pairs.append(SeedPair(*(read_walk(folder / "report") for folder in folders)))
            resampling = Resampling(evaluation.confidence, evaluation.resamples)
            found[name] = judge_relative_loss(pairs, self.target.gates.fp8_max_loss, resampling).to_json()
        for folder in (TOKENS, FEATURES):
            rmtree(out / folder, ignore_errors=True)
        figures = {"samples": chosen, "steps": self.target.gates.fp8_steps, "seeds": self.target.gates.fp8_seeds}
        return BuildResult(digest(found), {"strategies": found, "run": figures})

    def _capture_sample(self, context: dg.AssetExecutionContext, launcher: TorchLauncher, out: Path) -> int:
        """Capture plain features of the chosen training samples into the target's store; return their number."""
        from draftworks.data.tokenized import TokenizedSet, write_tokens

        rows = sorted(TokenizedSet.open(self.tokens.path), key=lambda row: digest(row.sample_id))
        rows = rows[: self.target.gates.fp8_samples]
        write_tokens(out / TOKENS, rows)
        (out / FEATURES).mkdir(exist_ok=True)
        capture = self.target.capture.as_plain()
        run = CaptureRun(
            out=out / FEATURES,
            target=self.files,
            tokens=out / TOKENS,
            taps=collect_taps(self.target, self.files.num_layers),
            capture=capture,
            store=self.workspace.locate_feature_store(self.files),
            sglang=self.workspace.sglang,
        )
        python = self.workspace.find_python(capture)
        launch_workers(context, launcher, self.workspace, "capture", run, capture.processes, capture.device, python)
        return len(rows)

    def _train_and_measure(
        self,
        context: dg.AssetExecutionContext,
        launcher: TorchLauncher,
        out: Path,
        folder: Path,
        name: str,
        seed: int,
        way: str,
    ) -> None:
        """Train one draft and write its report into `folder`, unless it is there; the draft itself is not kept."""
        report, draft = folder / "report", folder / "draft"
        done = folder / "measured"
        if done.exists():
            return
        for each in (report, draft):
            each.mkdir(parents=True, exist_ok=True)
        entry, strategy = self.target.strategies[name], self.strategies[name]
        store, heldout = self.workspace.locate_feature_store(self.files), self._locate_heldout()
        training, start_from = self._choose_training(name, seed), entry.start_from
        start = None if start_from is None else self.workspace.registry.resolve_path(start_from)
        vocab = (start or self._locate_vocab()) / VOCAB_FILE if strategy.uses_vocab_mapping else None
        train = TrainRun(
            out=draft,
            target=self.files,
            strategy=name,
            options=entry.options,
            training=training,
            train=FeatureSet(
                tokens=out / TOKENS,
                features=out / FEATURES,
                read_as="plain" if way == "plain" else self.target.capture.storage,
            ),
            heldout=heldout,
            store=store,
            vocab_mapping=vocab,
            start_from=start,
        )
        launch(context, launcher, self.workspace, "train", train, training.processes, training.device)
        loop = self.target.evaluation.loop.model_copy(update={"prompts": 0})
        evaluate = EvaluateRun(
            out=report,
            target=self.files,
            strategy=name,
            options=entry.options,
            draft=draft,
            train_tokens=out / TOKENS,
            heldout=heldout,
            store=store,
            vocab_mapping=vocab,
            evaluation=self.target.evaluation.model_copy(update={"loop": loop}),
            max_new_tokens=self.target.responses.max_new_tokens,
            max_length=self.target.max_length,
            micro_batch_size=training.micro_batch_size,
            device=training.device,
            seed=seed,
        )
        launch(context, launcher, self.workspace, "evaluate", evaluate, training.processes, training.device)
        done.touch()
        rmtree(draft, ignore_errors=True)

    def _choose_training(self, name: str, seed: int) -> TrainingSpec:
        """Return the target's training of a strategy, but of a fixed number of steps and with its last draft."""
        changes = {
            **{"seed": seed, "max_steps": self.target.gates.fp8_steps, "epochs": float(self.target.gates.fp8_steps)},
            **{"publish": "last", "eval_every": 0, "patience": 0, "tensorboard": False},
            "trackers": TrackersSpec(),
        }
        return self.target.strategies[name].training.model_copy(update=changes)

    def _list_seeds(self, name: str) -> Iterator[int]:
        first = self.target.strategies[name].training.seed
        yield from range(first, first + self.target.gates.fp8_seeds)

    def _identify(self, name: str, strategy: StrategySpec) -> dict[str, Any]:
        entry = self.target.strategies[name]
        options = strategy.parse_options(entry.options, where=f"options of {name}")
        streams = list(dict.fromkeys([*strategy.list_features(self.files.num_layers, options), "last"]))
        return {
            "options": options.to_identity(),
            "training": [self._choose_training(name, seed).to_identity() for seed in self._list_seeds(name)],
            "heldout": read_eval_data(self.workspace, self.target.name, HELDOUT, streams).to_json(),
            "vocab_mapping": self._load_vocab().data_version if strategy.uses_vocab_mapping else None,
            "start_from": None if entry.start_from is None else str(entry.start_from),
        }

    def _locate_heldout(self) -> FeatureSet:
        return locate_feature_set(self.workspace, self.target.name, HELDOUT)

    def _load_vocab(self) -> Artifact:
        return self.workspace.artifacts.load_current(VOCAB_MAPPING, self.target.name)

    def _locate_vocab(self) -> Path:
        return self._load_vocab().path
