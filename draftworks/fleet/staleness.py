"""Staleness: of reports, and of drafts, which may be old where their report is new. Torch-free, reads records only.

Dagster's own staleness is not transitive and is not shown for many targets at once, so this module compares the
identities of results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftworks.config.draft_options import read_draft_config
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.growing_files import count_lines
from draftworks.errors import DraftworksError
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import FileDigests, canonical_json, digest
from draftworks.storage.names import (
    CONVERSATIONS,
    HELDOUT_RESPONSES,
    RESPONSES,
    TOKENIZED_TRAIN,
    of_eval_set,
    of_strategy,
)
from draftworks.storage.records import (
    AnswersIdentity,
    ConversationsIdentity,
    DraftIdentity,
    EvalFeaturesIdentity,
    EvalSetIdentity,
    ReportIdentity,
)
from draftworks.targets.registry import HELDOUT, Registry, apply_overrides
from draftworks.targets.training_data import digest_training_data, find_training_files, identify_arrival


@dataclass(frozen=True)
class Subject:
    """What an evaluation of a target would measure now.

    Attributes:
        files: the target itself.
        drafts: the newest of each strategy that has one.
        responses: the newest of each eval set; None where it was never made.
        sources: by eval set, what its conversations would be made from; those of a set that is not looked at are left out.
    """

    files: TargetFiles
    drafts: dict[str, Artifact]
    responses: dict[str, Artifact | None]
    sources: dict[str, ConversationsIdentity | EvalSetIdentity]

    @property
    def identity(self) -> str:
        """Digest that is equal for two evaluations with equal results."""
        drafts = {name: [draft.data_version, draft.path.name] for name, draft in self.drafts.items()}
        made = [drafts, {name: _version(artifact) for name, artifact in self.responses.items()}]
        sources = {name: source.to_json() for name, source in self.sources.items()}
        return digest([self.files.digest, self.files.tokenizer_digest, sources, made])

    def changes(self, artifacts: ArtifactStore) -> list[str]:
        """Return, in words, what has changed since the newest reports; empty if nothing has."""
        found: list[str] = []
        for name in self.responses:
            found += self._changes_of_eval_set(name, artifacts)
        for strategy, draft in self.drafts.items():
            report = artifacts.find(of_strategy(strategy).report, self.files.name)
            if report is None or not _is_of(report, draft):
                found.append(f"{strategy} draft")
        return list(dict.fromkeys(found))

    def _changes_of_eval_set(self, name: str, artifacts: ArtifactStore) -> list[str]:
        # Records of an earlier version lack some keys: what they were made from is then another thing, as it should be.
        target, found = self.files.name, []
        features = artifacts.find(of_eval_set(name).features, target)
        captured = None if features is None else EvalFeaturesIdentity.of(features)
        if captured is not None and captured.target != self.files.digest:
            found.append("weights of the target")
        if captured is not None and captured.tokenizer != self.files.tokenizer_digest:
            found.append("tokenizer or chat template")
        reports = [artifacts.find(of_strategy(strategy).report, target) for strategy in self.drafts]
        if any(report and not is_measured_on(report, name, self.responses[name], features) for report in reports):
            found.append(f"eval set {name}")
        prepared = artifacts.find(of_eval_set(name).conversations, target) if name in self.sources else None
        if prepared is not None and not is_made_from(prepared, self.sources[name]):
            found.append(f"eval set {name}")
        return found


def find_published_drafts(artifacts: ArtifactStore, target: TargetSpec) -> dict[str, Artifact]:
    """The newest draft of every strategy that the target uses, where there is one."""
    found = {strategy: artifacts.find(of_strategy(strategy).draft, target.name) for strategy in target.strategies}
    return {strategy: draft for strategy, draft in found.items() if draft is not None}


def _version(artifact: Artifact | None) -> str | None:
    return None if artifact is None else artifact.data_version


def _is_of(report: Artifact, draft: Artifact) -> bool:
    """Whether a report is of this draft: equal weights are not enough, since drafts with other options may share
    them."""
    of = ReportIdentity.of(report)
    return (of.draft, of.draft_identity) == (draft.data_version, draft.path.name)


def is_made_from(prepared: Artifact, source: ConversationsIdentity | EvalSetIdentity) -> bool:
    """Whether conversations were made from these files with these settings."""
    return type(source).of(prepared) == source


def is_measured_on(report: Artifact, name: str, responses: Artifact | None, features: Artifact | None) -> bool:
    """Whether a report was measured on these answers and on these features, as far as its draft reads them."""
    of = ReportIdentity.of(report)
    measured = of.heldout if name == HELDOUT else of.evals.get(name)
    if measured is None or responses is None or features is None:
        return False
    known, streams = features.summary.get("stream_versions", {}), measured.streams
    return measured.answers == responses.data_version and isinstance(streams, dict) and streams.items() <= known.items()


ARRIVED = "arrived"
"""Key of the summary of a draft that was trained in arrival order: counts of the rows that were read for it."""
OVERRIDES = "overrides"
"""Key of a draft's summary: options and training settings of the run config that replaced those of the registry."""


@dataclass(frozen=True)
class Change:
    """One change since a draft was trained.

    Attributes:
        since: when the newer one was first seen, in seconds since the epoch; None if not known.
    """

    what: str
    since: float | None = None

    def __str__(self) -> str:
        if self.since is None:
            return self.what
        return f"{self.what} (since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d})"


@dataclass(frozen=True)
class TrainedDraft:
    """A draft, and what a training for its target would use now."""

    draft: Artifact
    target: TargetSpec
    files: TargetFiles
    registry: Registry
    artifacts: ArtifactStore
    digests: FileDigests

    @property
    def made_from(self) -> DraftIdentity:
        return DraftIdentity.of(self.draft)

    def changes(self) -> tuple[Change, ...]:
        """Return all changes since the training; empty if there is none. What cannot be compared is listed as not
        known. Rows that have come since a training in arrival order are among them; its draft is a hit all the same."""
        found = [*self._weights(), *self._data(), *self._recipe(), *self._more_rows()]
        return tuple({change.what: change for change in found}.values())

    def _weights(self) -> Iterator[Change]:
        trained_for = self.made_from.target
        if trained_for is None:
            yield Change("weights of the target: not known, its record does not say for which it was trained")
        elif trained_for != self.files.digest:
            yield Change("weights of the target", self._find_first_answers(self.files.digest))

    def _data(self) -> Iterator[Change]:
        tokens = self._current(TOKENIZED_TRAIN)
        trained_on = self.made_from.tokens
        if trained_on is None:
            yield Change("training data: not known, its record does not say on which it was trained")
        elif tokens is not None and tokens.data_version != trained_on:
            yield Change("training data", tokens.created)
        answers, prepared = self._current(RESPONSES), self._current(CONVERSATIONS)
        if answers is not None and AnswersIdentity.of(answers).tokenizer != self.files.tokenizer_digest:
            yield Change("tokenizer or chat template")
        answered = None if answers is None else AnswersIdentity.of(answers).conversations
        if prepared is not None and answered not in (None, prepared.data_version):
            yield Change("training data", prepared.created)  # an evaluation has made them, and no training since
        yield from self._files()

    def _files(self) -> Iterator[Change]:
        """Yield a change if the data files are newer than the prepared conversations."""
        prepared = self._current(CONVERSATIONS)
        try:
            now = digest_training_data(self.target, self.registry, self.digests)
        except DraftworksError as error:
            yield Change(f"training data: not known, {str(error).splitlines()[0]}")
            return
        if prepared is not None and ConversationsIdentity.of(prepared).dataset != now:
            yield Change("training data", self._later(find_training_files(self.target, self.registry)))

    def _more_rows(self) -> Iterator[Change]:
        """Yield a change if the source of a training in arrival order has given more rows since; an iterator cannot say so."""
        read = self.draft.summary.get(ARRIVED, {}).get("rows")
        if read is None or not self.target.arrives or (self.target.streaming and self.target.streaming.source):
            return
        more = count_lines(self.registry.load_dataset(self.target.dataset), self.registry.root) - read
        if more > 0:
            files = find_training_files(self.target, self.registry)
            yield Change(f"source: {more:,} more rows have come", self._later(files))

    def _recipe(self) -> Iterator[Change]:
        differing = [*self._data_settings(), *self._settings()]
        if differing:
            entry = self.registry.root / "targets" / f"{self.target.name}.yaml"
            yield Change(f"recipe: {', '.join(differing)}", self._later([entry]))

    def _data_settings(self) -> Iterator[str]:
        prepared, answers = self._current(CONVERSATIONS), self._current(RESPONSES)
        if prepared is not None:
            yield from _differing("data", ConversationsIdentity.of(prepared).data, self.target.data.to_identity())
        if answers is not None:
            found = AnswersIdentity.of(answers)
            recorded = {"max_length": found.max_length, "only_last_turn": found.only_last_turn}
            wanted = {"max_length": self.target.max_length, "only_last_turn": self.target.data.only_last_turn}
            known = {name: value for name, value in recorded.items() if value is not None}
            yield from _differing("", known, wanted)
            yield from _differing("responses", found.responses, self.target.responses.to_identity())

    def _settings(self) -> Iterator[str]:
        recorded = self.made_from
        strategy = resolve_strategy(recorded.strategy)
        entry = self.target.strategies[strategy.name]
        overrides = self.draft.summary.get(OVERRIDES, {})
        chosen = apply_overrides(
            self.target.name, strategy, entry, overrides.get("options", {}), overrides.get("training", {})
        )
        options = strategy.parse_options(chosen.options, where=f"options of {strategy.name}")
        yield from _differing("options", recorded.options, options.to_identity())
        arrival = identify_arrival(self.target, self.registry)
        if (recorded.arrival is None) != (arrival is None):
            yield f"streaming.order {'planned' if recorded.arrival is None else 'arrival'} → {'planned' if arrival is None else 'arrival'}"
        yield from _differing("streaming", recorded.arrival, arrival or {})
        yield from _differing("training", recorded.training, chosen.training.to_identity(strategy.batch_means(options)))
        start = entry.start_from
        began = None if start is None else read_draft_config(self.registry.resolve_path(start)).weights_digest
        if recorded.start_from != began and not overrides.get("start_from"):
            yield "start_from"

    def _current(self, asset: str) -> Artifact | None:
        return self.artifacts.find(asset, self.target.name)

    def _find_first_answers(self, weights: str) -> float | None:
        """Return when these weights of the target first answered its held-out conversations; None if they never did."""
        made = [
            each.created
            for each in self.artifacts.list_all(HELDOUT_RESPONSES, self.target.name)
            if AnswersIdentity.of(each).target == weights
        ]
        return min(made, default=None)

    def _later(self, paths: list[Path]) -> float | None:
        """Return the modification time of the newest file if it is later than the training."""
        newest = max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
        return newest if newest > self.draft.created else None


def _differing(group: str, recorded: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings whose value differs from the recorded one. A setting that the record does not have is left out."""
    as_recorded = json.loads(canonical_json(dict(now)))
    for name, before in (recorded or {}).items():
        if name in now and as_recorded[name] != before:
            yield f"{group}.{name} {_short(before)} → {_short(as_recorded[name])}".removeprefix(".")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
