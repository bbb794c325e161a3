"""What a plan is made of: a target's entry, its files as far as they are known, and what this deployment has made.

A result is looked up as a run asks for it, by the identity that it would have now. Nothing is read but records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from draftworks.config.data import ResponseSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.urls import is_url
from draftworks.data.sources import digest_dataset
from draftworks.errors import DraftworksError
from draftworks.planning.identities import PLANNED, TRAIN, Results, identify_result
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import DigestNotCached, RememberedDigests, digest
from draftworks.storage.names import RESPONSES, TOKENIZED_TRAIN, TRAINING_FEATURES, of_eval_set
from draftworks.storage.records import AnswersIdentity, FeaturesIdentity
from draftworks.targets.fitted_defaults import describe_fitted, read_machine
from draftworks.targets.gguf_store import NotConvertedError
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.resolve import TargetShape, read_shape, resolve_target
from draftworks.targets.training_data import (
    collect_taps,
    digest_training_data,
    identify_conversations,
    identify_eval_set,
    make_answers_identity,
)

EVAL_CACHE_KEY = "eval_cache_key"
"""In the identity of features of an eval set: it says which taps there are, and nothing of each."""


@dataclass(frozen=True)
class Found:
    """What exists of a result.

    Attributes:
        exact: the result itself.
        partial: the largest result that differs in the choice of its data alone, so that this one goes on from it.
    """

    exact: Artifact | None = None
    partial: Artifact | None = None

    def count_samples(self, planned: float) -> float:
        """Return how many of the planned samples exist: data is chosen by hash, so a smaller choice is part of a larger."""
        if self.exact is not None:
            return planned
        return 0.0 if self.partial is None else min(planned, float(self.partial.summary.get("samples", 0)))


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
    _results: dict[str, list[Artifact]] = field(default_factory=dict, compare=False)
    _found: dict[str, Artifact | None] = field(default_factory=dict, compare=False)

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
        except (DigestNotCached, NotConvertedError):
            return None

    @cached_property
    def taps(self) -> list[int]:
        """The hf_index of each tap that a capture for the target stores, ascending."""
        return collect_taps(self.target, self.shape.num_layers)

    @cached_property
    def eval_sets(self) -> tuple[str, ...]:
        """`heldout` and the named eval sets."""
        return (HELDOUT, *self.target.evals)

    def change(self, target: TargetSpec) -> PlanSubject:
        """Return the subject with another entry of the same target, which finds other results of it."""
        return replace(self, target=target, _found={})

    def list_results(self, asset: str) -> list[Artifact]:
        """Return the results of an asset for this target, newest first, as they were at the first call."""
        if asset not in self._results:
            found = self.artifacts.list_all(asset, self.target.name)
            self._results[asset] = [each for each in found if each.created < self.before]
        return self._results[asset]

    def find(self, asset: str) -> Artifact | None:
        """Return the result that a run of the target would find; None if it would make one, or that is not known."""
        if asset not in self._found:
            self._found[asset] = self._look_up(asset)
        return self._found[asset]

    def _look_up(self, asset: str) -> Artifact | None:
        prepared = {of_eval_set(name).conversations: name for name in self.eval_sets}
        if asset in prepared:
            return next(self._list_prepared(prepared[asset], same_choice=True), None)
        made = _FoundResults(self.registry, _FoundStore(self.artifacts.root, self.digests, subject=self), self.digests)
        try:
            wanted = identify_result(made, self.target, asset)
        except (DigestNotCached, DraftworksError):
            return None  # something that it is made from is not there
        name, results = digest(wanted), self.list_results(asset)
        exact = next((each for each in results if each.path.name == name), None)
        return exact or next((each for each in results if self._has_more_taps(each, wanted)), None)

    def _has_more_taps(self, made: Artifact, wanted: Mapping[str, Any]) -> bool:
        """Whether a result is features of an eval set that differ from the wanted ones in streams that nobody reads."""
        streams = {f"hf{tap}" for tap in self.taps}
        return (
            EVAL_CACHE_KEY in wanted
            and streams <= made.summary.get("stream_versions", {}).keys()
            and {**made.identity, EVAL_CACHE_KEY: wanted[EVAL_CACHE_KEY]} == wanted
        )

    def find_same_data(self, name: str = HELDOUT) -> Artifact | None:
        """Return the newest conversations that were prepared from the same files, whichever of them were chosen."""
        return next(self._list_prepared(name, same_choice=False), None)

    def list_data_versions(self, name: str) -> set[str]:
        """Return the versions of the conversations that were prepared from the files of an eval set as they are."""
        return {each.data_version for each in self._list_prepared(name, same_choice=False)}

    def find_answers(self, asset: str, part: str, settings: ResponseSpec, name: str = HELDOUT) -> Found:
        """Return what exists of the answers of a part of the conversations.

        Args:
            asset: that holds them; `name` is their eval set, or `heldout` for training data too.
        """
        exact = self.find(asset)
        return Found(exact, None if exact else _choose_largest(self._list_answers(asset, part, settings, name)))

    def find_features(self) -> Found:
        """Return what exists of the stored training features: of the same answers to the same data, whichever was chosen.

        Those that were streamed are not stored.
        """
        exact, files = self.find(TRAINING_FEATURES), self.files
        if files is None or (exact is not None and not exact.summary.get(PLANNED)):
            return Found(exact)
        taps, capture = set(self.taps), self.target.capture.to_identity()
        answers = self._list_answers(RESPONSES, TRAIN, self.target.responses, HELDOUT)
        versions = {each.data_version for each in answers}
        tokenized = self.list_results(TOKENIZED_TRAIN)
        usable = {each.data_version for each in tokenized if each.identity.get("responses") in versions}
        partial: list[Artifact] = []
        for each in self.list_results(TRAINING_FEATURES):
            found = FeaturesIdentity.of(each)
            if each.summary.get(PLANNED) or found.target != files.digest or found.capture != capture:
                continue
            if found.tokens in usable and taps <= set(found.taps or ()):
                partial.append(each)
        return Found(partial=_choose_largest(partial))

    def _list_prepared(self, name: str, same_choice: bool) -> Iterator[Artifact]:
        """Yield prepared conversations of the same files, newest first."""
        version, remote = self.find_data_version(name), self.is_remote(name)
        if version is None and not remote:
            return  # its files were never read
        if name == HELDOUT:
            wanted = identify_conversations(self.target, version, None)
        else:
            wanted = identify_eval_set(self.target, self.registry.load_eval_set(name), version, None)
        for each in self.list_results(of_eval_set(name).conversations):
            found = type(wanted).of(each)
            same = replace(found, dataset=version, vocab_size=None) == wanted
            if (remote or found.dataset == version) and (same or not same_choice):
                yield each

    def _list_answers(self, asset: str, part: str, settings: ResponseSpec, name: str) -> list[Artifact]:
        """Return the answers, newest first, to any choice of the conversations of the same files, with the same settings."""
        if self.files is None:
            return []
        related = self.list_data_versions(name)
        wanted = make_answers_identity(self.target, self.files, "", part, settings)
        found = [(each, AnswersIdentity.of(each)) for each in self.list_results(asset)]
        return [each for each, of in found if of.conversations in related and replace(of, conversations="") == wanted]

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


@dataclass(frozen=True)
class _FoundStore(ArtifactStore):
    """The results of a subject as they are found one from another, in place of the newest ones."""

    subject: PlanSubject = field(kw_only=True)

    def find(self, asset: str, target: str) -> Artifact | None:
        return self.subject.find(asset)


@dataclass(frozen=True)
class _FoundResults(Results):
    artifacts: _FoundStore

    def resolve_target_files(self, target: str) -> TargetFiles:
        files = self.artifacts.subject.files
        if files is None:
            raise DigestNotCached(target)
        return files


def _choose_largest(results: list[Artifact]) -> Artifact | None:
    return max(results, key=lambda each: each.summary.get("samples", 0), default=None)
