"""Typed identities of drafts, exports and reports, written by one asset and read by others; see also `data_records`.

The JSON is that of earlier versions: a field that their records lack is read as None, which equals no current value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from draftworks.storage.artifacts import Artifact
from draftworks.storage.asset_names import strategy_of_draft


@dataclass(frozen=True)
class EvalData:
    """Versions of the eval data of a measurement: that of the answers and, by name, those of the streams."""

    answers: str
    streams: dict[str, str] | str
    """A single digest of all streams in early records."""

    def to_json(self) -> list[Any]:
        return [self.answers, self.streams]

    @classmethod
    def from_json(cls, found: list[Any]) -> EvalData:
        return cls(*found)


@dataclass(frozen=True)
class Limits:
    """Length limits of answers, in tokens."""

    max_new_tokens: int
    max_length: int

    def to_json(self) -> list[int]:
        return [self.max_new_tokens, self.max_length]


@dataclass(frozen=True)
class DraftIdentity:
    """What a draft was made from: options of strategy and training as JSON, otherwise digests and content versions.

    Attributes:
        start_from: digest of the weights that it began with; None for random ones.
        target: digest of the target's weights.
        tokens: content version of the training tokens.
        features: digest of the content versions of the streams that were read.
    """

    strategy: str
    options: dict[str, Any]
    start_from: str | None
    training: Mapping[str, Any]
    target: str | None
    tokens: str | None
    features: str | None
    vocab_mapping: str | None
    heldout: EvalData | None

    @property
    def seed(self) -> int:
        return self.training["seed"]

    def to_json(self) -> dict[str, Any]:
        assert self.heldout is not None
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "heldout": self.heldout.to_json()}

    @classmethod
    def of(cls, draft: Artifact) -> DraftIdentity:
        found: dict[str, Any] = dict.fromkeys(each.name for each in fields(cls)) | draft.identity
        strategy = found["strategy"] or strategy_of_draft(draft.asset)
        known = {each.name: found[each.name] for each in fields(cls)}
        heldout = None if found["heldout"] is None else EvalData.from_json(found["heldout"])
        defaults = {"options": found["options"] or {}, "training": found["training"] or {}}
        return cls(**{**known, **defaults, "strategy": strategy, "heldout": heldout})


@dataclass(frozen=True)
class ExportIdentity:
    """Inputs of an export.

    Attributes:
        draft: digest of what the draft was made from.
        weights: version of the draft's weights.
        target: digest of the target's weights, its path or hub id, and its commit; some formats name the target.
        settings: formats and dtype that the target's entry asks for.
        formats: all export formats of the strategy with their revisions, so that an export is made again when one is added,
            or written otherwise.
        card: digest of the model card's file; None where there is none.
    """

    draft: str
    weights: str | None
    target: Sequence[str | None] | None
    settings: Mapping[str, Any] | None
    formats: Sequence[str] | None
    card: str | None

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, export: Artifact) -> ExportIdentity:
        values: dict[str, Any] = {each.name: export.identity.get(each.name) for each in fields(cls)}
        return cls(**values)


@dataclass(frozen=True)
class ReportIdentity:
    """Inputs of a report.

    Attributes:
        draft: version of the draft's weights.
        draft_identity: digest of the draft's inputs: drafts with equal weights may differ in options.
        evaluation: evaluation settings.
        bigram_tokens: version of the tokens from which the bigram table was counted.
    """

    draft: str
    draft_identity: str | None
    heldout: EvalData | None
    evaluation: Mapping[str, Any] | None
    limits: Limits | None
    bigram_tokens: str | None
    evals: Mapping[str, EvalData] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        assert self.heldout is not None
        assert self.limits is not None
        return {
            "draft": self.draft,
            "draft_identity": self.draft_identity,
            "heldout": self.heldout.to_json(),
            "evals": {name: measured.to_json() for name, measured in self.evals.items()},
            "evaluation": self.evaluation,
            "limits": self.limits.to_json(),
            "bigram_tokens": self.bigram_tokens,
        }

    @classmethod
    def of(cls, report: Artifact) -> ReportIdentity:
        found = report.identity
        heldout, limits = found.get("heldout"), found.get("limits")
        return cls(
            draft=found["draft"],
            draft_identity=found.get("draft_identity"),
            heldout=None if heldout is None else EvalData.from_json(heldout),
            evals={name: EvalData.from_json(measured) for name, measured in found.get("evals", {}).items()},
            evaluation=found.get("evaluation"),
            limits=None if limits is None else Limits(*limits),
            bigram_tokens=found.get("bigram_tokens"),
        )
