"""What results were made from, as one asset leaves it and others read it. The JSON on disk is that of earlier versions: what a
record of one of these does not say is None, which equals nothing that there is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftworks.storage.artifacts import Artifact


@dataclass(frozen=True)
class EvalData:
    """An eval set as it was measured on: content versions of its answers and, by name, of the streams that were read."""

    answers: str
    streams: dict[str, str] | str
    """Of early records one digest of all streams."""

    def to_json(self) -> list[Any]:
        return [self.answers, self.streams]

    @classmethod
    def from_json(cls, found: list[Any]) -> EvalData:
        return cls(*found)


@dataclass(frozen=True)
class Limits:
    """Where answers end, in tokens."""

    max_new_tokens: int
    max_length: int

    def to_json(self) -> list[int]:
        return [self.max_new_tokens, self.max_length]


@dataclass(frozen=True)
class ReportIdentity:
    """What a report is of.

    Attributes:
        draft: version of its weights.
        draft_identity: digest of what it was made from: equal weights may have other options.
        evaluation: settings.
        bigram_tokens: version of what the bigram table was counted on.
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
