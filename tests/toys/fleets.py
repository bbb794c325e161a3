"""A fleet of targets whose models, eval data, drafts and reports are records only: nothing is ever computed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import of_eval_set
from draftworks.targets.training_data import identify_eval_data
from resources.workspace import Workspace


@dataclass(frozen=True)
class Fleet:
    """A registry, and what is published for its targets."""

    root: Path

    @property
    def registry(self) -> Path:
        return self.root / "registry"

    @property
    def workspace(self) -> Workspace:
        """A new one, as every tick has."""
        return Workspace(registry_root=str(self.registry))

    def target_file(self, target: str) -> Path:
        return self.registry / "targets" / f"{target}.yaml"

    def model(self, target: str) -> Path:
        return self.registry / "models" / target

    def add(self, target: str, **entry) -> None:
        """A target with a model of a few bytes, and nothing published."""
        self.target_file(target).parent.mkdir(parents=True, exist_ok=True)
        self.target_file(target).write_text(yaml.safe_dump({"model": f"models/{target}", "dataset": "none", **entry}))
        self.model(target).mkdir(parents=True)
        shape = dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"), 4096)
        (self.model(target) / "config.json").write_text(json.dumps(shape))
        for name in ("model.safetensors", "tokenizer.json"):
            (self.model(target) / name).write_text(f"of {target}")

    def add_measured(self, target: str, **entry) -> None:
        """A target with a draft, and a report of it."""
        self.add(target, **entry)
        self.publish_eval_data(target, "first")
        self.publish_draft(target, "first")
        self.publish_report(target)

    def copy(self, target: str, name: str) -> None:
        """Another target of the same model, with the same things published."""
        shutil.copy(self.target_file(target), self.target_file(name))
        for asset in (self.root / "var").glob(f"*/{target}"):
            shutil.copytree(asset, asset.with_name(name))

    def publish_eval_data(self, target: str, version: str, name: str = "heldout") -> None:
        """Responses of that version, and their features by the model as it is."""
        self._publish(f"{name}_responses", target, version, {})
        self.publish_features(target, name)

    def publish_features(self, target: str, name: str = "heldout", beside: tuple[str, ...] = ()) -> None:
        """Those that the draft reads, and those of other strategies `beside` them."""
        files = self.workspace.resolve_target_files(target)
        version = f"{self._current(f'{name}_responses', target).data_version} by {files.digest}"
        identity = {"target": files.digest, "tokenizer": files.tokenizer_digest, "beside": beside}
        streams = dict.fromkeys(("hf2", *beside), version)
        self._publish(f"{name}_eval_features", target, version, identity, {"stream_versions": streams})

    def publish_set(self, target: str, name: str) -> None:
        """An eval set, named or `heldout`, of the data set's files and the settings as they are."""
        workspace = self.workspace
        spec, files = workspace.registry.load_target(target), workspace.resolve_target_files(target)
        identity = identify_eval_data(name, spec, files.vocab_size, workspace.registry, workspace.digests).to_json()
        version = digest(identity)
        self._publish(of_eval_set(name).conversations, target, version, identity)
        self.publish_eval_data(target, version, name)

    def publish_draft(self, target: str, version: str, strategy: str = "eagle3", **identity: Any) -> None:
        self._publish(f"{strategy}_draft", target, version, identity)

    def publish_report(self, target: str, strategy: str = "eagle3") -> None:
        """A report of what is there."""
        evals = {name: self._eval_versions(target, name) for name in self.workspace.registry.load_target(target).evals}
        draft = self._current(f"{strategy}_draft", target)
        identity = {
            "draft": draft.data_version,
            "draft_identity": draft.path.name,
            "heldout": self._eval_versions(target, "heldout"),
            "evals": evals,
        }
        self._publish(f"{strategy}_report", target, "a report", identity)

    def _eval_versions(self, target: str, name: str) -> list[Any]:
        responses, features = (self._current(f"{name}_{kind}", target) for kind in ("responses", "eval_features"))
        return [responses.data_version, {"hf2": features.summary["stream_versions"]["hf2"]}]

    def _current(self, asset: str, target: str) -> Artifact:
        return self.workspace.artifacts.load_current(asset, target)

    def _publish(
        self, asset: str, target: str, version: str, identity: dict, summary: dict[str, Any] | None = None
    ) -> None:
        self.workspace.artifacts.obtain(
            asset, target, {**identity, "version": version}, lambda out: BuildResult(version, summary or {})
        )
