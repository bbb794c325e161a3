"""A registry with drafts, reports and exports that are records only: put into service, never loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from draftworks.data.conversations import Scalar
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import PROMPTS, REPORT
from draftworks.evaluation.report.tables import build_prompts_table, publish_table
from draftworks.evaluation.result import EvalResult
from draftworks.export.conventions import GATE_MEANINGS
from draftworks.programs.service_commands import open_service
from draftworks.service.promotion import Request, Service
from draftworks.service.register import InService
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult, FileManifest
from draftworks.storage.files import publish_json
from draftworks.storage.identity import digest
from draftworks.storage.names import of_eval_set, of_strategy
from draftworks.targets.registry import Registry

ACCURACY = EvalResult(30.0, 10.0, 40, {"acc_corrects": (8.0, 4.0), "acc_denoms": (10.0, 8.0)})
PROMPT_COUNT = 120
SHAPE = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")


@dataclass(frozen=True)
class ServiceSite:
    """A registry with a target `small`, and what is published for it."""

    root: Path
    strategy: str = "eagle3"
    evals: tuple[str, ...] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)
    draft_tokens: int = 5

    def __post_init__(self) -> None:
        for name in ("targets", "datasets", "evals"):
            (self.registry / name).mkdir(parents=True, exist_ok=True)
        for name in self.evals:
            (self.registry / "evals" / f"{name}.yaml").write_text("dataset: none\n")
        self.add_target("small")

    @property
    def registry(self) -> Path:
        return self.root / "registry"

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(self.root / "var")

    def add_target(self, name: str, weights: str = "first") -> None:
        entry = {"model": f"models/{name}", "dataset": "none", "evals": list(self.evals), "service": {}, **self.entry}
        (self.registry / "targets" / f"{name}.yaml").write_text(yaml.safe_dump(entry))
        model = self.registry / "models" / name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(dict.fromkeys(SHAPE, 4096)))
        (model / "model.safetensors").write_text(f"{name}: {weights}")
        (model / "tokenizer.json").write_text("{}")

    def open(self, target: str = "small") -> Service:
        return open_service(self.registry, target, self.strategy)

    def publish(
        self,
        name: str,
        accepted: Mapping[str, float] | float,
        target: str = "small",
        passed: bool = True,
        answers: str = "first",
        prompts: int = PROMPT_COUNT,
    ) -> str:
        """A draft that accepts so many tokens per pass on each eval set; returns its digest."""
        draft = self.publish_draft(name, target)
        values = accepted if isinstance(accepted, Mapping) else dict.fromkeys(["heldout", *self.evals], accepted)
        self.publish_report(draft, values, answers, prompts)
        self.publish_export(draft, passed)
        return draft.path.name

    def publish_draft(
        self, name: str, target: str = "small", summary: Mapping[str, Any] | None = None, **identity: Any
    ) -> Artifact:
        files = self.open(target).files
        identity = {"name": name, "target": files.digest, **identity}
        built = BuildResult(digest(f"weights of {name}"), dict(summary or {}))
        return self.artifacts.obtain(of_strategy(self.strategy).draft, target, identity, lambda out: built)

    def publish_report(
        self, draft: Artifact, accepted: Mapping[str, float], answers: str = "first", prompts: int = PROMPT_COUNT
    ) -> Artifact:
        measured = {
            name: self.name_eval_data(name, draft.target, self._publish_answers(name, draft.target, answers, prompts))
            for name in accepted
        }

        def build(out: Path) -> BuildResult:
            for name, mean in accepted.items():
                drafts = self.measure_drafts(mean, prompts, draft.data_version)
                report = Report(
                    draft.target,
                    self.strategy,
                    name,
                    drafts,
                    draft_tokens=self.draft_tokens,
                    resampling=Resampling(resamples=100),
                )
                (out / name).mkdir()
                publish_table(out / name / PROMPTS, build_prompts_table(drafts))
                files = FileManifest.record(out / name, (PROMPTS,)).digests
                publish_json(out / name / REPORT, {**report.to_json(), "files": files})
                self.publish_more(out / name, report)
            return BuildResult(f"of {draft.path.name}")

        identity = {
            "draft": draft.data_version,
            "draft_identity": draft.path.name,
            "heldout": measured.pop("heldout"),
            "evals": measured,
            "values": dict(accepted),
        }
        return self.artifacts.obtain(of_strategy(self.strategy).report, draft.target, identity, build)

    def publish_export(self, draft: Artifact, passed: bool = True) -> Artifact:
        gates = [{"name": gate, "passed": passed, "description": "as it is", "figures": {}} for gate in GATE_MEANINGS]
        made = {"digest": f"export-{draft.path.name}", "gates": gates, "commands": {"SGLang": "serve DRAFT_FOLDER"}}

        def build(out: Path) -> BuildResult:
            (out / "sglang").mkdir()
            (out / "sglang" / "model.safetensors").write_text(draft.data_version)
            return BuildResult(f"export of {draft.data_version}", {"formats": {"sglang": made}, "refused": {}})

        identity = {
            "draft": draft.path.name,
            "weights": draft.data_version,
            "target": [self.open(draft.target).files.digest, None, None],
            "passed": passed,
        }
        return self.artifacts.obtain(of_strategy(self.strategy).export, draft.target, identity, build)

    def name_eval_data(self, eval_set: str, target: str, answers: str) -> list[Any]:
        """Versions of the answers and of their features, as a report's identity has them."""
        return [answers, "features"]

    def measure_drafts(self, mean: float, prompts: int, weights: str) -> dict[str, DraftMeasurement]:
        """The drafts of a report on one eval set."""
        walk = tuple(self.make_walk(index, mean, weights) for index in range(prompts))
        return {"trained": DraftMeasurement(ACCURACY, walk=walk)}

    def publish_more(self, folder: Path, report: Report) -> None:
        """Further files of a report on one eval set."""

    def make_walk(self, index: int, mean: float, weights: str) -> PromptAcceptance:
        return make_walk(index, mean, weights)

    def name_columns(self, index: int) -> dict[str, Scalar]:
        """Columns of a prompt, by which it is sliced."""
        return {}

    def promote(self, digest: str | None = None, **asked: Any) -> InService:
        service = self.open()
        return service.promote(service.judge(digest), Request("me", **asked))

    def rollback(self, digest: str | None = None, **asked: Any) -> InService:
        return self.open().rollback(Request("me", **asked), digest)

    def load_registry(self) -> Registry:
        return Registry(self.registry)

    def _publish_answers(self, eval_set: str, target: str, answers: str, prompts: int) -> str:
        rows = [
            TokenRow(
                f"s{index}",
                np.arange(5 + len(answers), dtype=np.int32),
                np.ones(5 + len(answers), bool),
                self.name_columns(index),
            )
            for index in range(prompts)
        ]

        def build(out: Path) -> BuildResult:
            return BuildResult(write_tokens(out / "tokens", rows)["digest"])

        identity = {"answers": answers, "prompts": prompts}
        return self.artifacts.obtain(of_eval_set(eval_set).responses, target, identity, build).data_version


def make_walk(index: int, mean: float, weights: str) -> PromptAcceptance:
    """A hundred passes that accept `mean` tokens on average.

    Of four prompts one accepts a token more and one a token less, which ones the weights decide: intervals have a width, and
    are narrow.
    """
    shuffled = np.random.default_rng([index // 4, *weights.encode()]).permutation([1, -1, 0, 0])
    total = max(round(mean * 100) + int(shuffled[index % 4]), 0)
    accepted = [total // 100 + (place < total % 100) for place in range(100)]
    return PromptAcceptance.from_accepted_counts(f"s{index}", accepted, sum(accepted) + 100)
