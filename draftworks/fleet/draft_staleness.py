"""Staleness of drafts: changes of the target's weights, tokenizer, data or options since the training. Torch-free.

A report may be new and its draft old: `staleness` is about reports, this module about drafts.
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
from draftworks.errors import DraftworksError
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import FileDigests, canonical_json
from draftworks.storage.names import CONVERSATIONS, HELDOUT_RESPONSES, RESPONSES, TOKENIZED_TRAIN
from draftworks.storage.records import AnswersIdentity, ConversationsIdentity, DraftIdentity
from draftworks.targets.registry import Registry, apply_overrides
from draftworks.targets.training_data import digest_training_data, find_training_files

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
class DraftComparison:
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
        known."""
        found = [*self._weights(), *self._data(), *self._recipe()]
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
