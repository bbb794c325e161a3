"""The registry: the folder of YAML files that a user edits, as validated specs. Torch-free, reads only what it is asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.draft_config import read_config
from draftworks.errors import ConfigError
from draftworks.specs import (
    DatasetSpec,
    DeploymentSpec,
    EvalSpec,
    StrategyEntry,
    TargetSpec,
    TrainingSpec,
    checked_name,
    load_yaml,
    validated,
)
from draftworks.strategies import StrategySpec, resolve_strategy

HELDOUT = "heldout"
"""The built-in eval set: rows split off a target's own conversations."""


@dataclass(frozen=True)
class Registry:
    """`root/targets/*.yaml`, `root/datasets/*.yaml` and `root/deployment.yaml`."""

    root: Path

    def target_names(self) -> list[str]:
        """Names of all targets, sorted; the files are not opened."""
        return self._names("targets")

    def target(self, name: str) -> TargetSpec:
        """One target, its strategies' options checked.

        Raises:
            ConfigError: unknown target (closest names suggested), unknown key, bad value, unknown strategy, option or
                export format.
        """
        path = self._path("targets", name)
        spec = load_yaml(path, TargetSpec, name=name)
        for strategy, entry in spec.strategies.items():
            try:
                resolved = resolve_strategy(strategy)
                resolved.parse_options(entry.options, where=f"{path}: strategies.{strategy}.options")
                for export_format in entry.export.formats or ():
                    resolved.export(export_format)
            except ConfigError as error:
                raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        return spec

    def dataset(self, name: str) -> DatasetSpec:
        return load_yaml(self._path("datasets", name), DatasetSpec, name=name)

    def eval_names(self) -> list[str]:
        """Names of all eval sets, sorted; `heldout` is built in and not among them."""
        return self._names("evals")

    def eval(self, name: str) -> EvalSpec:
        if name == HELDOUT:
            raise ConfigError(f"{self.root / 'evals'}: {HELDOUT} is the built-in eval set: give yours another name")
        return load_yaml(self._path("evals", name), EvalSpec, name=name)

    def deployment(self) -> DeploymentSpec:
        """The deployment; defaults where there is no file."""
        path = self.root / "deployment.yaml"
        return load_yaml(path, DeploymentSpec) if path.exists() else DeploymentSpec()

    def var(self) -> Path:
        """Where runs write."""
        return self.located(self.deployment().var)

    def located(self, path: str) -> Path:
        """A path of the registry: relative ones start at its root."""
        return (self.root / path).resolve()

    def problems(self) -> list[str]:
        """Everything wrong with any entry, a message each."""
        found = []
        names = {"targets": self.target_names(), "datasets": self._names("datasets"), "evals": self.eval_names()}
        for kind, load in (("targets", self.target), ("datasets", self.dataset), ("evals", self.eval)):
            for name in names[kind]:
                try:
                    load(name)
                except ConfigError as error:
                    found.append(str(error))
        return found

    def _names(self, kind: str) -> list[str]:
        folder = self.root / kind
        if not folder.is_dir() and kind == "evals":
            return []
        if not folder.is_dir():
            raise ConfigError(f"{folder}: expected a folder of YAML files, found none. Is {self.root} a registry?")
        return sorted(path.stem for path in folder.glob("*.yaml"))

    def _path(self, kind: str, name: str) -> Path:
        try:
            path = self.root / kind / f"{checked_name(name)}.yaml"
        except ValueError as error:
            raise ConfigError(f"{self.root / kind}: {error}") from error
        if not path.exists():
            names = self._names(kind)
            close = difflib.get_close_matches(name, names, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(names[:20]) or 'none'}"
            raise ConfigError(f"{path}: no such file; {hint}")
        return path


def with_overrides(
    target: str, strategy: StrategySpec, entry: StrategyEntry, options: dict[str, Any], training: dict[str, Any]
) -> StrategyEntry:
    """A target's strategy with every option filled in: the registry's, and over them those of one run.

    Raises:
        ConfigError: unknown option or setting, or a bad value.
    """
    where = f"target {target}: {strategy.name}"
    typed = strategy.parse_options({**entry.options, **options}, where=f"{where} options")
    merged = validated(TrainingSpec, {**entry.training.model_dump(), **training}, where=f"{where} training")
    return entry.model_copy(update={"options": typed.model_dump(), "training": merged})


def resolved_options(target: TargetSpec, registry: Registry) -> dict[str, Any]:
    """The recipe of a target as JSON: every option that decides a result, with the defaults filled in.

    Raises:
        StoreError: a draft to begin from is not there.
    """
    return {
        "max_length": target.max_length,
        "data": target.data.identity(),
        "responses": target.responses.identity(),
        "capture": target.capture.identity(),
        "evals": sorted(target.evals),
        "evaluation": target.evaluation.identity(),
        "strategies": {
            name: {
                "options": resolve_strategy(name).parse_options(entry.options, f"target {target.name}").identity(),
                "training": entry.training.identity(),
                "start_from": entry.start_from and read_config(registry.located(entry.start_from)).weights_digest,
                "export": entry.export.model_dump(),
            }
            for name, entry in target.strategies.items()
        },
    }
