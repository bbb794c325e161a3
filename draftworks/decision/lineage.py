"""Which draft was tuned from which, and what trainings of a target have cost. Torch-free, reads records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from draftworks.decision.record import Costs
from draftworks.service.record import InService, ServedDraft
from draftworks.storage.artifacts import Artifact
from draftworks.storage.records import DraftIdentity


@dataclass(frozen=True)
class Lineage:
    """The drafts of a target and strategy.

    Attributes:
        drafts: all that are there, newest first.
        history: every record that was in service, oldest first.
    """

    drafts: Sequence[Artifact]
    history: Sequence[InService]

    @cached_property
    def first_records(self) -> dict[str, InService]:
        """The record with which each draft was first put into service, by its digest."""
        found: dict[str, InService] = {}
        for record in self.history:
            found.setdefault(record.draft.digest, record)
        return found

    def find_origin(self, draft: ServedDraft) -> ServedDraft | None:
        """Return the draft of a former record that a draft in service was tuned from; None if it was not tuned."""
        made = self._find(draft.digest)
        start = None if made is None else DraftIdentity.of(made).start_from
        if start is None:
            return None
        before = self.first_records[draft.digest].number
        earlier = [
            record.draft
            for record in self.history
            if record.number < before and record.draft.weights == start and record.draft.digest != draft.digest
        ]
        return earlier[-1] if earlier else None

    def list_tunes(self, draft: ServedDraft, target_digest: str) -> list[Artifact]:
        """Return the drafts that were tuned from a draft for these weights of the target, newest first."""
        return [
            each
            for each in self.drafts
            if each.path.name != draft.digest
            and DraftIdentity.of(each).start_from == draft.weights
            and DraftIdentity.of(each).target == target_digest
        ]

    def read_costs(self) -> Costs:
        """Return what the newest tune and the newest training from the start have taken."""
        tunes = [each for each in self.drafts if DraftIdentity.of(each).start_from is not None]
        fresh = [each for each in self.drafts if DraftIdentity.of(each).start_from is None]
        return Costs(_read_newest_cost(tunes), _read_newest_cost(fresh))

    def _find(self, digest: str) -> Artifact | None:
        return next((each for each in self.drafts if each.path.name == digest), None)


def read_gpu_hours(draft: Artifact) -> float | None:
    """Return the GPU-hours of a training: its seconds times its ranks; None if nothing was trained or recorded."""
    try:
        seconds, ranks = float(draft.summary["seconds"]), int(draft.summary["world_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return seconds * ranks / 3600 if 0 < seconds < float("inf") and ranks > 0 else None


def _read_newest_cost(drafts: Sequence[Artifact]) -> float | None:
    return next((hours for each in drafts if (hours := read_gpu_hours(each)) is not None), None)
