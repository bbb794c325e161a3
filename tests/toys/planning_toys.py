"""A registry with a target of any size, and results of it as programs record them, without anything computed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftworks.planning.plan import Plan, make_plan
from draftworks.planning.subject import PlanSubject
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
}


@dataclass
class PlannedTarget:
    """A target of a registry in a folder; nothing of it is made until a test publishes something."""

    root: Path
    name: str = "one"
    shape: dict[str, int] = field(default_factory=lambda: dict(LLAMA_8B))
    entry: dict[str, Any] = field(default_factory=dict)
    deployment: dict[str, Any] = field(default_factory=dict)
    rows: int = 1000

    def __post_init__(self) -> None:
        for folder in ("targets", "datasets", "data", f"models/{self.name}"):
            (self.root / "registry" / folder).mkdir(parents=True, exist_ok=True)
        model = self.root / "registry" / "models" / self.name
        (model / "config.json").write_text(json.dumps(self.shape))
        (model / "model.safetensors").write_text(f"weights of {self.name}")
        (model / "tokenizer.json").write_text("{}")
        row = {"messages": [{"role": "user", "content": "u" * 400}, {"role": "assistant", "content": "a" * 1200}]}
        (self.root / "registry" / "data" / "talks.jsonl").write_text((json.dumps(row) + "\n") * self.rows)
        (self.root / "registry" / "datasets" / "talks.yaml").write_text("files: [data/talks.jsonl]\n")
        (self.root / "registry" / "deployment.yaml").write_text(yaml.safe_dump(self.deployment))
        self.edit()

    @property
    def registry(self) -> Registry:
        return Registry(self.root / "registry")

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(self.registry.resolve_var_folder())

    @property
    def subject(self) -> PlanSubject:
        return PlanSubject.of(self.name, self.registry)

    def edit(self, **entry: Any) -> None:
        """Change keys of the target's entry."""
        self.entry = {"model": f"models/{self.name}", "dataset": "talks", **self.entry, **entry}
        path = self.root / "registry" / "targets" / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self.entry))

    def plan(self, *strategies: str, **options: Any) -> Plan:
        return make_plan(self.subject, strategies, **options)

    def digest_files(self) -> None:
        """Read model and data once, as a first run does, so that their digests are remembered."""
        digests = FileDigests(self.registry.resolve_var_folder() / "digests.json")
        resolve_target(self.registry.load_target(self.name), self.registry, digests)
        for path in (self.root / "registry" / "data").iterdir():
            digests.of_file(path)

    def publish(self, asset: str, identity: dict[str, Any], version: str, **summary: Any) -> Artifact:
        """Publish a result with these figures; it becomes the current one."""

        def build(folder: Path) -> BuildResult:
            (folder / "file").write_text(version)
            time.sleep(0.002)  # the seconds of a result have three digits, and a plan leaves out what takes none
            return BuildResult(version, summary)

        return self.artifacts.obtain(asset, self.name, {**identity, "code_version": "1"}, build)
