"""The checkpoint that a training goes on from where its plan has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.storage.changes import describe_changes
from draftworks.training.checkpoint_files import read_record
from draftworks.training.checkpoint_manager import CheckpointManager


@dataclass(frozen=True)
class EarlierPlan:
    """A plan of this training that was replaced: identity of its checkpoints, and the steps that are still the same."""

    identity: Mapping[str, Any]
    common_steps: int


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, and the identity that it has; None for the first step."""

    folder: Path | None
    identity: Mapping[str, Any]


def find_resume_point(
    manager: CheckpointManager, identity: Mapping[str, Any], list_earlier: Callable[[], Iterable[EarlierPlan]]
) -> ResumePoint:
    """Return the newest checkpoint of this plan, or of an earlier one at a step that both have in common. A collective.

    A checkpoint of neither is returned too: reading it raises what differs.

    Args:
        list_earlier: called where a checkpoint is not of this plan.
    """

    def find() -> tuple[int, Mapping[str, Any]] | None:
        for step in reversed(manager.steps()):
            found = read_record(manager.folder.final(step)).state.get("identity", {})
            if not describe_changes(identity, found):
                return step, identity
            plan = next((each for each in list_earlier() if not describe_changes(each.identity, found)), None)
            if plan is None or step <= plan.common_steps:
                return step, identity if plan is None else plan.identity
        return None

    manager.wait()
    found = broadcast_from_rank_0(run_on_every_rank(lambda: find() if get_rank() == 0 else None))
    return ResumePoint(None, identity) if found is None else ResumePoint(manager.folder.final(found[0]), found[1])
