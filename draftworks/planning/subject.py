"""What a plan is made of: a target's entry, its files as far as they are known, and what this deployment has made.

A result is looked up as a run asks for it, by the identity that it would have now. Nothing is read but records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from draftworks.config.data import ResponseSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.urls import is_url
from draftworks.data.sources import digest_dataset
from draftworks.errors import DraftworksError, StoreError
from draftworks.planning.identities import PLANNED, TRAIN, Results, identify_result
from draftworks.planning.kept_answers import NO_ANSWERS, KeptAnswers, find_kept_answers
from draftworks.planning.measured import MeasuredSample, identify_sample, list_samples
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import DigestNotCached, RememberedDigests, digest
from draftworks.storage.names import HELDOUT_RESPONSES, RESPONSES, TOKENIZED_TRAIN, TRAINING_FEATURES, of_eval_set
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
ALMOST = math.nextafter(1.0, 0.0)
"""The share of a result whose work is all there, while the result itself is to be made."""


@dataclass(frozen=True)
class Found:
    """What exists of a result.

    Attributes:
        exact: the result itself.
        partial: the largest result that differs in the choice of its data alone, so that this one goes on from it.
        twin: the result itself, made for another target with the same weights: all of its work is there.
        kept: answers that an unfinished step has made.
    """

    exact: Artifact | None = None
    partial: Artifact | None = None
    twin: Artifact | None = None
    kept: KeptAnswers = NO_ANSWERS

    def count_samples(self, planned: float) -> float:
        """Return how many of the planned samples exist: data is chosen by hash, so a smaller choice is part of a larger."""
        if self.exact is not None or self.twin is not None:
            return planned
        done = 0.0 if self.partial is None else float(self.partial.summary.get("samples", 0))
        return min(planned, max(done, float(self.kept.count)))


_MOST_OTHERS = 200
"""Other targets whose results are looked at."""


@dataclass(frozen=True)
class _ResultsKey:
    asset: str
    shared: bool


@dataclass(frozen=True)
class PlanSubject:
    """A target of a registry, and the results of its deployment.

    Attributes:
        digests: of files that were read before. What was never read is not read for a plan: nothing was made of it.
        before: only results that were made before this time count, in seconds since the epoch.
        shared: results that were made for other targets with the same weights count as if they were this target's.
    """

    target: TargetSpec
    registry: Registry
    artifacts: ArtifactStore
    digests: RememberedDigests
    before: float = math.inf
    shared: bool = False
    _results: dict[_ResultsKey, list[Artifact]] = field(default_factory=dict, compare=False)
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
        key = _ResultsKey(asset, self.shared)
        if key not in self._results:
            found = self.artifacts.list_all(asset, self.target.name)
            if self.shared and self.files is not None:
                of_these = (None, self.files.digest)
                others = [each for name in self._twins for each in self.artifacts.list_all(asset, name)]
                found += [each for each in others if each.identity.get("target") in of_these]
                found.sort(key=lambda each: -each.created)
            self._results[key] = [each for each in found if each.created < self.before]
        return self._results[key]

    @cached_property
    def anywhere(self) -> PlanSubject:
        """The same subject, to which results of other targets with the same weights count too: a run makes these again from
        stored answers and features, which are kept by content."""
        return replace(self, shared=True, _found={})

    @cached_property
    def _twins(self) -> list[str]:
        """Names of other targets for which something was made with the same weights."""
        found: dict[str, None] = {}
        for asset in (HELDOUT_RESPONSES, TRAINING_FEATURES):
            names = sorted(path.name for path in (self.artifacts.root / asset).glob("*/"))
            for name in islice(names, _MOST_OTHERS):
                if name != self.target.name and name not in found and self._is_twin(asset, name):
                    found[name] = None
        return list(found)

    def _is_twin(self, asset: str, name: str) -> bool:
        try:
            made = self.artifacts.find(asset, name)
        except (StoreError, ValueError):
            return False  # whose own plan says what is wrong with it
        return made is not None and self.files is not None and made.identity.get("target") == self.files.digest

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
        if exact is not None or self.files is None:
            return Found(exact)
        shared = self.anywhere
        partial = _choose_largest(shared._list_answers(asset, part, settings, name))
        return Found(None, partial, shared.find(asset), shared._find_kept(part, settings, name))

    def _find_kept(self, part: str, settings: ResponseSpec, name: str) -> KeptAnswers:
        """Return what unfinished steps have kept of the answers to a part of the conversations that a run would find."""
        prepared = self.find(of_eval_set(name).conversations)
        if prepared is None or self.files is None or settings.mode != "regenerate":
            return NO_ANSWERS
        wanted = make_answers_identity(self.target, self.files, "", part, settings)
        folder, dtype = self.artifacts.root / "answers" / self.files.digest, self.target.capture.compute_dtype
        return find_kept_answers(folder, wanted, None if settings.endpoint else dtype, prepared.path / part)

    @cached_property
    def measured(self) -> list[MeasuredSample]:
        """What `plan --measure` found out with the target's weights and engine, newest first."""
        if self.files is None:
            return []
        capture = self.target.capture
        found = list_samples(self.artifacts.root, self.files.digest)
        same = [each for each in found if each.identity["engine"] == capture.engine]
        return [
            each
            for each in same
            if each.identity["compute_dtype"] == capture.compute_dtype and each.made_at < self.before
        ]

    def find_measured(self, settings: ResponseSpec, name: str) -> MeasuredSample | None:
        """Return the newest sample of the training data that was answered with these settings; None for other data."""
        if name != HELDOUT or self.files is None or not self.measured:
            return None
        wanted = identify_sample(self.target, self.files, self.find_data_version(HELDOUT), settings.to_identity())
        return next((each for each in self.measured if each.identity == wanted), None)

    def find_made_share(self, asset: str) -> float:
        """Return 1 for a result that a run would find, just below 1 for one that is there but for another target, else 0."""
        if self.find(asset) is not None:
            return 1.0
        return ALMOST if self.anywhere.find(asset) is not None else 0.0

    def find_features(self) -> Found:
        """Return what exists of the stored training features: of the same answers to the same data, whichever was chosen.

        Those that were streamed are not stored.
        """
        exact, files = self.find(TRAINING_FEATURES), self.files
        if files is None or (exact is not None and not exact.summary.get(PLANNED)):
            return Found(exact)
        taps, capture = set(self.taps), self.target.capture.to_identity()
        shared = self.anywhere
        answers = shared._list_answers(RESPONSES, TRAIN, self.target.responses, HELDOUT)
        versions = {each.data_version for each in answers}
        tokenized = shared.list_results(TOKENIZED_TRAIN)
        usable = {each.data_version for each in tokenized if each.identity.get("responses") in versions}
        partial: list[Artifact] = []
        for each in shared.list_results(TRAINING_FEATURES):
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
