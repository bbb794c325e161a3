"""What a plan is made of: a target's entry, its files as far as they are known, and what this deployment has made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.urls import is_url
from draftworks.data.sources import digest_dataset
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import DigestNotCached, RememberedDigests
from draftworks.targets.fitted_defaults import describe_fitted, read_machine
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.resolve import TargetShape, read_shape, resolve_target
from draftworks.targets.training_data import digest_training_data


@dataclass(frozen=True)
class PlanSubject:
    """A target of a registry, and the results of its deployment.

    Attributes:
        digests: of files that were read before. What was never read is not read for a plan: nothing was made of it.
        before: only results that were made before this time count, in seconds since the epoch.
    """

    target: TargetSpec
    registry: Registry
    artifacts: ArtifactStore
    digests: RememberedDigests
    before: float = math.inf

    @classmethod
    def of(cls, name: str, registry: Registry, before: float = math.inf) -> PlanSubject:
        """Return the subject for a target of the registry. Raises ConfigError if its entry is invalid."""
        var = registry.resolve_var_folder()
        digests = RememberedDigests(var / "digests.json")
        return cls(registry.load_target(name), registry, ArtifactStore(var, digests), digests, before)

    @cached_property
    def shape(self) -> TargetShape:
        """Sizes of the model. Raises ConfigError if its config.json cannot be read."""
        return read_shape(self.target, self.registry)

    @cached_property
    def files(self) -> TargetFiles | None:
        """The target with its digests; None if they would have to be computed, so that nothing was made of it yet."""
        try:
            return resolve_target(self.target, self.registry, self.digests)
        except DigestNotCached:
            return None

    @cached_property
    def _results(self) -> dict[str, list[Artifact]]:
        return {}

    @cached_property
    def eval_sets(self) -> tuple[str, ...]:
        """`heldout` and the named eval sets."""
        return (HELDOUT, *self.target.evals)

    def list_results(self, asset: str) -> list[Artifact]:
        """Return the results of an asset for this target, newest first, as they were at the first call."""
        if asset not in self._results:
            found = self.artifacts.list_all(asset, self.target.name)
            self._results[asset] = [each for each in found if each.created < self.before]
        return self._results[asset]

    def is_remote(self, eval_set: str) -> bool:
        """Whether files of an eval set's data lie elsewhere; those of the training data for `heldout`."""
        return any(is_url(file) for name in self._list_datasets(eval_set) for file in self._load_files(name))

    def find_data_version(self, eval_set: str) -> str | None:
        """Return the digest of an eval set's data, or of the training data for `heldout`.

        None if its files were never read, or lie elsewhere and are not asked for.
        """
        if self.is_remote(eval_set):
            return None
        try:
            if eval_set == HELDOUT:
                return digest_training_data(self.target, self.registry, self.digests)
            spec = self.registry.load_dataset(self.registry.load_eval_set(eval_set).dataset)
            return digest_dataset(spec, self.registry.root, self.digests)
        except DigestNotCached:
            return None

    def _list_datasets(self, eval_set: str) -> list[str]:
        if eval_set != HELDOUT:
            return [self.registry.load_eval_set(eval_set).dataset]
        return self.target.training_datasets

    def _load_files(self, dataset: str) -> list[str]:
        return self.registry.load_dataset(dataset).files

    def describe_chosen(self) -> list[str]:
        """Return a line for each default that the model's size or this machine has changed."""
        return describe_fitted(self.registry.read_target(self.target.name), self.target)

    def describe_unknown(self) -> list[str]:
        """Return a line for each thing that a plan of a training in arrival order cannot know."""
        streaming = self.target.streaming
        if streaming is None or streaming.until is None:
            return []
        lines = [
            "arrival order: samples are taken to be as long as those that are prepared before; only streamed is possible"
        ]
        if streaming.until.source:
            lines.append("how much its source has is not known: its drafts are planned with what is prepared before")
        return lines

    def uses_gpu(self, device: str) -> bool:
        """Whether a job's device is a GPU: `auto` is one unless jobs run on this machine, which has none."""
        if device != "auto":
            return device == "cuda"
        return self.registry.load_deployment().launcher.kind != "local" or read_machine().uses_gpu
