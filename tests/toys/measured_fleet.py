"""Targets whose models, drafts and reports are records only: nothing is ever computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.evaluation.report.summary import SCHEMA_VERSION
from draftworks.fleet.leaderboard import Fleet, Standing
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target


def rung(number: int, metric: str, value: float, prompts: int | None = None) -> dict[str, Any]:
    """An entry of `rungs` in report.json; with prompts it has an interval of 0.1 to both sides."""
    counts = {"prompts": prompts, "passes": 50, "low": value - 0.1, "high": value + 0.1}
    counted = None if prompts is None else {**counts, "confidence": 0.95, "tokens_per_pass": 1 + value}
    return {
        "rung": number,
        "metric": metric,
        "value": value,
        "temperature": None,
        "speed_up": None,
        "acceptance": counted,
    }


def walk(value: float, prompts: int = 9) -> dict[str, Any]:
    return rung(3, "rung3_walk_acc_len", value, prompts)


@dataclass(frozen=True)
class MeasuredFleet:
    root: Path

    @property
    def registry(self) -> Registry:
        return Registry(self.root / "registry")

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(self.root / "var")

    def target_file(self, name: str) -> Path:
        return self.registry.root / "targets" / f"{name}.yaml"

    def model(self, name: str) -> Path:
        return self.registry.root / "models" / name

    def add(self, name: str) -> None:
        """A target of a model of a few bytes, and nothing published."""
        self.target_file(name).parent.mkdir(parents=True, exist_ok=True)
        self.target_file(name).write_text(yaml.safe_dump({"model": f"models/{name}", "dataset": "none"}))
        self.model(name).mkdir(parents=True)
        shape = dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"), 4096)
        (self.model(name) / "config.json").write_text(json.dumps(shape))
        for file in ("model.safetensors", "tokenizer.json"):
            (self.model(name) / file).write_text(f"of {name}")

    def add_measured(self, name: str, *rungs: dict[str, Any], day: int = 1) -> None:
        """A target with eval data, a draft and a report of it."""
        self.add(name)
        made_from = self._digests(name)
        self.publish("heldout_responses", name, "answers", made_from)
        self.publish("heldout_eval_features", name, "features", made_from)
        self.publish("eagle3_draft", name, "first draft", {})
        self.publish_report(name, *rungs, day=day)

    def publish(self, asset: str, target: str, version: str, identity: dict[str, Any]) -> Artifact:
        return self.artifacts.obtain(asset, target, {**identity, "version": version}, lambda out: BuildResult(version))

    def publish_report(
        self,
        target: str,
        *rungs: dict[str, Any],
        day: int = 1,
        schema: int = SCHEMA_VERSION,
        rivals: RivalVerdict | None = None,
    ) -> Artifact:
        """A report of what is there, of a day in May; rung 1 is in every report."""
        draft = self.artifacts.load_current("eagle3_draft", target)
        report = {
            "schema_version": schema,
            "target": target,
            "strategy": "eagle3",
            "eval_set": "heldout",
            "created": may(day).isoformat(),
            "draft_tokens": 3,
            "label_agreement": 1.0,
            "drafts": {"trained": {"rungs": [rung(1, "simulated_acc_len", 0.5), *rungs]}},
            "provenance": {},
            **({} if rivals is None else {"rivals": rivals.to_json()}),
        }

        def build(out: Path) -> BuildResult:
            (out / "heldout").mkdir()
            (out / "heldout" / "report.json").write_text(json.dumps(report))
            return BuildResult("a report")

        identity = {
            "draft": draft.data_version,
            "draft_identity": draft.path.name,
            "heldout": ["answers", {}],
            "evals": {},
            "report": report,
        }
        return self.artifacts.obtain("eagle3_report", target, identity, build)

    def _digests(self, target: str) -> dict[str, str]:
        fleet = Fleet.of(self.registry)
        files = resolve_target(fleet.registry.load_target(target), fleet.registry, fleet.digests)
        return {"target": files.digest, "tokenizer": files.tokenizer_digest}

    def standings(self) -> list[Standing]:
        return Fleet.of(self.registry).standings()

    def standing(self, target: str) -> Standing:
        return next(found for found in self.standings() if found.target == target)


def may(day: int) -> datetime:
    return datetime(2026, 5, day, tzinfo=UTC)
