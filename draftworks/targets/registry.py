"""The registry: the folder of YAML files that a user edits, read as validated specs. Torch-free.

A file is opened only when its entry is requested.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from draftworks.config.draft_options import read_draft_config
from draftworks.config.launchers import LauncherSpec, merge_launcher
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import (
    DatasetSpec,
    EvalSpec,
    StrategyEntry,
    TargetSpec,
    TrainingSpec,
)
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.config.strict_yaml import MAX_BYTES, load_yaml, parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.files import read_bytes
from draftworks.storage.names import HELDOUT, require_name
from draftworks.storage.words import suggest_or_list
from draftworks.targets.entry_reading import Parsed, read_entry
from draftworks.targets.fitted_defaults import fit_defaults

Read = TypeVar("Read")
KINDS = ("targets", "datasets", "evals")
"""The folders of a registry; each YAML file in them is one entry."""
DEPLOYMENT = "deployment.yaml"
_INVALID_KEY = re.compile(r"\.\.\.|[\x00-\x1f\x7f]|[\ud800-\udfff]")
"""Characters that Dagster does not allow in a partition key. A name that is invalid otherwise is still a partition, and
the first step of its run reports the problem."""


@dataclass(frozen=True)
class Registry:
    """Registry in a folder: `targets/*.yaml`, `datasets/*.yaml`, `evals/*.yaml` and `deployment.yaml` below `root`."""

    root: Path

    def list_targets(self) -> list[str]:
        """Return the names of all targets, sorted; the files are not opened."""
        return self._list_names("targets")

    def list_targets_with(self, word: str) -> list[str]:
        """Return the names of the targets whose file has a word anywhere, sorted; no file is parsed.

        A file that cannot be read is left out: the first step of its target says what is wrong.
        """
        return [name for name in self.list_targets() if self._has_word(name, word.encode())]

    def find_in_target_file(self, name: str, pattern: re.Pattern[bytes]) -> set[str]:
        """Return what a pattern matches in the text of a target's file, not parsed; nothing if it cannot be read."""
        try:
            return {match.decode() for match in pattern.findall(self._read_target_file(name))}
        except (OSError, ValueError):
            return set()

    def load_target(self, name: str) -> TargetSpec:
        """Return one target, with defaults that fit its model and this machine. Raises as `read_target`."""
        return self._fit(self.read_target(name))

    def _fit(self, spec: TargetSpec) -> TargetSpec:
        return fit_defaults(spec, self.resolve_path(spec.model), partial(self._find_launcher, spec))

    def _find_launcher(self, target: TargetSpec, program: str) -> LauncherSpec | None:
        try:
            return self.resolve_launcher(target, program)
        except ConfigError:
            return None  # the deployment is wrong: whoever needs it says so

    def read_target(self, name: str) -> TargetSpec:
        """Return one target as it is written, after validation of its strategies' options and export formats, and of its
        launcher.

        Raises:
            ConfigError: unknown target (closest names suggested), unknown key, bad value, unknown strategy, option or
                export format, or launcher settings that do not fit the deployment's.
        """
        entry = self._read_entry(name)
        if entry.spec is None or entry.problems:
            raise ConfigError("\n".join(entry.problems))
        return entry.spec

    def salvage_target(self, name: str) -> TargetSpec | None:
        """Return what is left of an entry without what is wrong with it, with defaults that fit; None if nothing is."""
        try:
            spec = self._read_entry(name).spec
        except ConfigError:
            return None
        return None if spec is None else self._fit(spec)

    def _read_entry(self, name: str) -> Parsed[TargetSpec]:
        return read_entry(self._find_path("targets", name), name, self._find_deployment)

    def _find_deployment(self) -> DeploymentSpec | None:
        try:
            return self.load_deployment()
        except ConfigError:
            return None  # the entry may be right; whoever needs the deployment says what is wrong with it

    def resolve_launcher(self, target: TargetSpec, program: str) -> LauncherSpec:
        """Return the launcher settings of one program's jobs for a target: the deployment's with the target's merged in."""
        where = f"target {target.name}: launcher"
        return merge_launcher(self.load_deployment().launcher, target.launcher, program, where)

    def find_target_file(self, name: str) -> Path:
        """Return the path of a target's file, not opened. Raises ConfigError with the closest names if it is absent."""
        return self._find_path("targets", name)

    def load_dataset(self, name: str) -> DatasetSpec:
        return load_yaml(self._find_path("datasets", name), DatasetSpec, name=name)

    def list_datasets(self) -> list[str]:
        """Return the names of all data sets, sorted."""
        return self._list_names("datasets")

    def find_unknown_names(self, target: TargetSpec) -> list[str]:
        """Return a line for each data set and eval set that a target's entry names and that has no file."""
        datasets, evals = self.list_datasets(), self.list_eval_sets()
        mixed = [] if target.mix is None else target.mix.datasets
        named = [("dataset", target.dataset, datasets), *(("mix.datasets", name, datasets) for name in mixed)]
        named += [("evals", name, evals) for name in target.evals if name != HELDOUT]
        path = self.root / "targets" / f"{target.name}.yaml"
        found = [
            f"{path}: {key}: no file {'evals' if key == 'evals' else 'datasets'}/{name}.yaml; {suggest_or_list(name, known)}"
            for key, name, known in named
            if name not in known
        ]
        return found + self._find_unknown_eval_data(name for name in target.evals if name in evals)

    def _find_unknown_eval_data(self, evals: Iterable[str]) -> list[str]:
        """Return a line for each eval set whose data set has no file."""
        found, datasets = [], self.list_datasets()
        for name in evals:
            with suppress(ConfigError):  # of the eval set itself, which whoever loads it says
                dataset = self.load_eval_set(name).dataset
                if dataset not in datasets:
                    path = self.root / "evals" / f"{name}.yaml"
                    hint = suggest_or_list(dataset, datasets)
                    found.append(f"{path}: dataset: no file datasets/{dataset}.yaml; {hint}")
        return found

    def list_eval_sets(self) -> list[str]:
        """Return the names of all eval sets, sorted; `heldout` is built in and not among them."""
        return self._list_names("evals")

    def load_eval_set(self, name: str) -> EvalSpec:
        if name == HELDOUT:
            raise ConfigError(f"{self.root / 'evals'}: {HELDOUT} is the built-in eval set: give yours another name")
        return load_yaml(self._find_path("evals", name), EvalSpec, name=name)

    def load_deployment(self) -> DeploymentSpec:
        """Return the deployment; defaults if there is no file."""
        path = self.root / DEPLOYMENT
        return load_yaml(path, DeploymentSpec) if os.path.lexists(path) else DeploymentSpec()

    def read_data(self, read: Callable[[DatasetSpec, Path], Read], name: str) -> Read:
        """Return what `read` finds in a data set's files, given its entry and the registry's root."""
        return read(self.load_dataset(name), self.root)

    def resolve_var_folder(self) -> Path:
        """Return the folder that runs write to, `var` of the deployment."""
        return self.resolve_path(self.load_deployment().var)

    def resolve_path(self, path: str) -> Path:
        """Return a path of a registry file as an absolute one; a relative path starts at the registry's root."""
        return (self.root / path).resolve()

    def find_problems(self) -> list[str]:
        """Return a message for each problem that the registry's files show: all entries, deployment, unread files."""
        return self.find_shared_problems() + self._collect_errors("targets", self.load_target)

    def find_shared_problems(self) -> list[str]:
        """Return a line for each problem in data sets, eval sets, deployment and unread files."""
        found = self.find_unread_files()
        found += self._collect_errors("datasets", self.load_dataset) + self._collect_errors("evals", self.load_eval_set)
        found += self._find_unknown_eval_data(self.list_eval_sets())
        try:
            return found + self._find_unknown_targets(self.load_deployment())
        except ConfigError as error:
            return found + str(error).splitlines()

    def _find_unknown_targets(self, deployment: DeploymentSpec) -> list[str]:
        """Return a message for each target that notifications name and that does not exist."""
        names, found = self.list_targets(), []
        for number, channel in enumerate(deployment.notifications):
            for name in channel.targets or ():
                if name not in names:
                    found.append(
                        f"{_format_path(self.root / DEPLOYMENT)}: notifications.{number}.targets: no target {name}; "
                        f"{suggest_or_list(name, names)}"
                    )
        return found

    def _collect_errors(self, kind: str, load: Callable[[str], object]) -> list[str]:
        found = []
        for name in self._list_names(kind):
            try:
                load(name)
            except ConfigError as error:
                found += str(error).splitlines()
        return found

    def find_unread_files(self) -> list[str]:
        """Return a message for each file that looks like an entry but is not read."""
        found = []
        for kind in KINDS:
            for path in (self.root / kind / name for name in self._list_visible(kind)):
                if path.suffix.lower() in (".yaml", ".yml") and path.suffix != ".yaml":
                    found.append(
                        f"{_format_path(path)}: is not read, since its name does not end in .yaml: rename it to {path.stem}.yaml"
                    )
                elif path.suffix == ".yaml" and _INVALID_KEY.search(path.stem):
                    found.append(f"{_format_path(path)}: is not read: {_explain_name(path.stem)}")
        for path in sorted(self.root.glob("*.y*ml")):
            if path.name != DEPLOYMENT and not path.name.startswith("."):
                found.append(
                    f"{_format_path(path)}: is not read: only {DEPLOYMENT} and the folders {', '.join(KINDS)} are"
                )
        return found

    def _list_names(self, kind: str) -> list[str]:
        stems = [name.removesuffix(".yaml") for name in self._list_visible(kind) if name.endswith(".yaml")]
        return sorted(stem for stem in stems if not _INVALID_KEY.search(stem))

    def _list_visible(self, kind: str) -> list[str]:
        """Return the names in a folder, sorted, without hidden files (such as those of editors)."""
        folder = self.root / kind
        if not folder.is_dir() and kind == "evals":
            return []
        if not folder.is_dir():
            raise ConfigError(f"{folder}: expected a folder of YAML files, found none. Is {self.root} a registry?")
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))

    def _has_word(self, target: str, word: bytes) -> bool:
        try:
            return word in self._read_target_file(target)
        except (OSError, ValueError):
            return False

    def _read_target_file(self, name: str) -> bytes:
        # No Path and no look whether it exists: of a thousand files, those cost as much as reading.
        return read_bytes(os.path.join(self.root, "targets", f"{require_name(name)}.yaml"), MAX_BYTES)

    def _find_path(self, kind: str, name: str) -> Path:
        try:
            path = Path(self.root, kind, f"{require_name(name)}.yaml")
        except ValueError as error:
            raise ConfigError(f"{self.root / kind}: {error}") from error
        if not os.path.lexists(path):  # a broken link passes: the reader reports it
            names = self._list_names(kind)
            raise ConfigError(f"{path}: no such file; {suggest_or_list(name, names)}")
        return path


@dataclass(frozen=True)
class ReadOnceRegistry(Registry):
    """Registry whose entries are as they were when they were first asked for, so that whoever asks often reads each once."""

    _read: dict[tuple[str, ...], Any] = field(default_factory=dict, compare=False)

    def list_targets(self) -> list[str]:
        return list(self._remember(super().list_targets))

    def load_target(self, name: str) -> TargetSpec:
        return self._remember(super().load_target, name)

    def read_target(self, name: str) -> TargetSpec:
        return self._remember(super().read_target, name)

    def load_dataset(self, name: str) -> DatasetSpec:
        return self._remember(super().load_dataset, name)

    def load_eval_set(self, name: str) -> EvalSpec:
        return self._remember(super().load_eval_set, name)

    def load_deployment(self) -> DeploymentSpec:
        return self._remember(super().load_deployment)

    def read_data(self, read: Callable[[DatasetSpec, Path], Read], name: str) -> Read:
        key = ("read_data", read.__qualname__, name)
        if key not in self._read:
            self._read[key] = super().read_data(read, name)
        return self._read[key]

    def _read_target_file(self, name: str) -> bytes:
        return self._remember(super()._read_target_file, name)

    def _remember(self, load: Callable[..., Read], *name: str) -> Read:
        key = (load.__name__, *name)
        if key not in self._read:
            try:
                self._read[key] = load(*name)
            except ConfigError as error:
                self._read[key] = error
        found = self._read[key]
        if isinstance(found, ConfigError):
            raise found
        return found


def _format_path(path: Path) -> str:
    """Return the path as one line of printable text, with control characters and invalid bytes escaped."""
    return (
        str(path).encode("unicode_escape", "backslashreplace").decode() if _INVALID_KEY.search(str(path)) else str(path)
    )


def _explain_name(name: str) -> str:
    try:
        require_name(name)
    except ValueError as error:
        return str(error)
    return ""


def apply_overrides(
    target: str, strategy: StrategySpec, entry: StrategyEntry, options: dict[str, Any], training: dict[str, Any]
) -> StrategyEntry:
    """Return a target's strategy entry with every option filled in; a run's options override those of the registry.

    Raises:
        ConfigError: unknown option or setting, or a bad value.
    """
    where = f"target {target}: {strategy.name}"
    typed = strategy.parse_options({**entry.options, **options}, where=f"{where} options")
    merged = parse_spec(TrainingSpec, {**entry.training.model_dump(), **training}, where=f"{where} training")
    return entry.model_copy(update={"options": typed.model_dump(), "training": merged})


def resolve_recipe(target: TargetSpec, registry: Registry) -> dict[str, Any]:
    """Return the recipe of a target as JSON values: every option that decides a result, with the defaults filled in.

    Raises:
        StoreError: a draft to start from is absent.
    """
    return {
        "max_length": target.max_length,
        "data": target.data.to_identity(),
        "responses": target.responses.to_identity(),
        "capture": target.capture.to_identity(),
        "evals": sorted(target.evals),
        "evaluation": target.evaluation.to_identity(target.strategies),
        "strategies": {
            name: {**resolve_training_options(target, name, registry), "export": entry.export.model_dump()}
            for name, entry in target.strategies.items()
        },
    }


def resolve_training_options(target: TargetSpec, strategy: str, registry: Registry) -> dict[str, Any]:
    """Return the options of one strategy of a target and of its training as JSON values, with the defaults filled in.

    Raises:
        StoreError: the draft to start from is absent.
    """
    entry, spec = target.strategies[strategy], resolve_strategy(strategy)
    options = spec.parse_options(entry.options, f"target {target.name}")
    arrival = None if target.streaming is None else target.streaming.identify_arrival()
    return {
        "options": options.to_identity(),
        "training": entry.training.to_identity(spec.batch_means(options)),
        "start_from": entry.start_from and read_draft_config(registry.resolve_path(entry.start_from)).weights_digest,
        **({} if arrival is None else {"streaming": arrival}),
    }
