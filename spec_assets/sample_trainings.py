"""Trainings for a comparison: on samples of a target's data, measured on its held-out prompts; their drafts are not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.run_files import VOCAB_FILE, CaptureRun, EvaluateRun, FeatureSet, TargetFiles, TrainRun
from draftworks.config.strategies import resolve_strategy
from draftworks.config.trackers import TrackersSpec
from draftworks.planning.identities import locate_feature_set, read_eval_data
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import HELDOUT_FEATURES, HELDOUT_RESPONSES, VOCAB_MAPPING
from draftworks.targets.registry import HELDOUT
from draftworks.targets.training_data import collect_taps
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import launch
from spec_assets.workers import launch_workers

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
    from draftworks.evaluation.ladder.statistics import Resampling

READS = (VOCAB_MAPPING, HELDOUT_RESPONSES, HELDOUT_FEATURES)
"""Assets that these trainings read, beside the tokens that they are given."""


@dataclass(frozen=True)
class SampleTrainings:
    """Trainings of a target's strategies, each of so many optimizer steps with so many seeds."""

    context: dg.AssetExecutionContext
    launcher: TorchLauncher
    workspace: Workspace
    target: TargetSpec
    files: TargetFiles
    steps: int
    seeds: int

    def capture(self, samples: FeatureSet) -> None:
        """Capture plain features of a tokenized set into the target's store; what the store has is not captured again."""
        samples.features.mkdir(parents=True, exist_ok=True)
        capture = self.target.capture.as_plain()
        run = CaptureRun(
            out=samples.features,
            target=self.files,
            tokens=samples.tokens,
            taps=collect_taps(self.target, self.files.num_layers),
            capture=capture,
            store=self.workspace.locate_feature_store(self.files),
            sglang=self.workspace.sglang,
            vllm=self.workspace.vllm,
        )
        python, processes, device = self.workspace.find_python(capture), capture.processes, capture.device
        launch_workers(self.context, self.launcher, self.workspace, "capture", run, processes, device, python)

    def _train_and_measure(self, samples: FeatureSet, folder: Path, name: str, seed: int) -> Path:
        """Train one draft and write its report into `folder`, unless it is there; return the report's folder."""
        report, draft = folder / "report", folder / "draft"
        done = folder / "measured"
        if done.exists():
            return report
        for each in (report, draft):
            each.mkdir(parents=True, exist_ok=True)
        entry, strategy = self.target.strategies[name], resolve_strategy(name)
        store = self.workspace.locate_feature_store(self.files)
        heldout = locate_feature_set(self.workspace.results, self.target.name, HELDOUT)
        training, start_from = self._choose_training(name, seed), entry.start_from
        start = None if start_from is None else self.workspace.registry.resolve_path(start_from)
        vocab = (start or self._load_vocab().path) / VOCAB_FILE if strategy.uses_vocab_mapping else None
        train = TrainRun(
            out=draft,
            target=self.files,
            strategy=name,
            options=entry.options,
            training=training,
            train=samples,
            heldout=heldout,
            store=store,
            vocab_mapping=vocab,
            start_from=start,
        )
        launch(self.context, self.launcher, self.workspace, "train", train, training.processes, training.device)
        loop = self.target.evaluation.loop.model_copy(update={"prompts": 0})
        evaluate = EvaluateRun(
            out=report,
            target=self.files,
            strategy=name,
            options=entry.options,
            draft=draft,
            train_tokens=samples.tokens,
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
        launch(self.context, self.launcher, self.workspace, "evaluate", evaluate, training.processes, training.device)
        done.touch()
        rmtree(draft, ignore_errors=True)
        return report

    def measure_walks(
        self, sets: Mapping[str, FeatureSet], name: str, out: Path
    ) -> Iterator[dict[str, Sequence[PromptAcceptance]]]:
        """Yield, for each seed of a strategy's trainings, from its own on, the walk of the draft of each set."""
        from draftworks.evaluation.report.comparison import read_walk

        for seed in self._list_seeds(name):
            folders = {way: out / name / f"seed-{seed}-{way}" for way in sets}
            yield {way: read_walk(self._train_and_measure(sets[way], folders[way], name, seed)) for way in sets}

    @property
    def resampling(self) -> Resampling:
        from draftworks.evaluation.ladder.statistics import Resampling

        return Resampling(self.target.evaluation.confidence, self.target.evaluation.resamples)

    def identify(self, tokens: Artifact) -> dict[str, Any]:
        """Return what decides the figures of every strategy, beside how samples are chosen from these tokens."""
        return {
            "target": self.files.digest,
            "tokens": tokens.data_version,
            "capture": self.target.capture.as_plain().to_identity(),
            "strategies": {name: self._identify_strategy(name) for name in self.target.strategies},
            "evaluation": self.target.evaluation.to_identity(),
        }

    def _list_seeds(self, name: str) -> range:
        first = self.target.strategies[name].training.seed
        return range(first, first + self.seeds)

    def _identify_strategy(self, name: str) -> dict[str, Any]:
        entry, strategy = self.target.strategies[name], resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"options of {name}")
        streams = list(dict.fromkeys([*strategy.list_features(self.files.num_layers, options), "last"]))
        trainings = (self._choose_training(name, seed) for seed in self._list_seeds(name))
        return {
            "options": options.to_identity(),
            "training": [each.to_identity(strategy.batch_means(options)) for each in trainings],
            "heldout": read_eval_data(self.workspace.results, self.target.name, HELDOUT, streams).to_json(),
            "vocab_mapping": self._load_vocab().data_version if strategy.uses_vocab_mapping else None,
            "start_from": None if entry.start_from is None else str(entry.start_from),
        }

    def _choose_training(self, name: str, seed: int) -> TrainingSpec:
        """Return the target's training of a strategy, but of a fixed number of steps and with its last draft."""
        changes = {
            **{"seed": seed, "max_steps": self.steps, "epochs": float(self.steps)},
            **{"publish": "last", "eval_every": 0, "patience": 0, "tensorboard": False},
            "trackers": TrackersSpec(),
        }
        return self.target.strategies[name].training.model_copy(update=changes)

    def _load_vocab(self) -> Artifact:
        return self.workspace.artifacts.load_current(VOCAB_MAPPING, self.target.name)
