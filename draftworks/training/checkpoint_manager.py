"""`CheckpointManager`: saves, rotates and tracks checkpoints, the best among them, on all ranks together."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from draftworks.distributed.collectives import (
    broadcast_from_rank_0,
    gather_from_ranks,
    get_rank,
    get_world_size,
    run_on_every_rank,
)
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.result import BLOCK_METRIC, WALK_METRIC, find_metric
from draftworks.storage.artifacts import FileRecord, list_files
from draftworks.storage.files import describe_changes, publish_json, read_json
from draftworks.storage.words import suggest_or_list
from draftworks.training.checkpoint_files import (
    CheckpointFolder,
    is_complete,
    read_record,
    sync_and_checksum,
    write_record,
)
from draftworks.training.snapshot import Snapshot, save_moments, save_weights_and_rng

log = logging.getLogger(__name__)


def _sort_key(metric: str) -> tuple[bool, str]:
    """Acceptance lengths first: those that drafts are chosen by."""
    return not metric.endswith("acc_len"), metric


@dataclass(frozen=True)
class BestRule:
    """Which evaluation is better: `metric` larger (or smaller, with `smaller`) by more than `min_delta`."""

    metric: str = "eval/simulated_acc_len"
    smaller: bool = False
    min_delta: float = 0.0

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the metric of an evaluation, None if the evaluation is empty.

        Raises:
            ConfigError: the evaluation has no such metric, or it is not a number.
        """
        if not metrics:
            return None
        score = find_metric(metrics, self.metric)
        if not isinstance(score, (int, float)):
            numbers = {name for name, value in metrics.items() if isinstance(value, (int, float))}
            raise ConfigError(
                f"training.best_metric: no evaluation has {self.metric!r} as a number; "
                f"{suggest_or_list(self.metric, sorted({*numbers, BLOCK_METRIC, WALK_METRIC}, key=_sort_key), 70)}"
            )
        return float(score)

    def is_better(self, metrics: Mapping[str, Any], best: BestRecord | None) -> bool:
        """Whether an evaluation beats the best. An empty one, or one that is not finite, never does."""
        score = self.score(metrics)
        if score is None or not math.isfinite(score):
            return False
        if best is None:
            return True
        gain = best.score - score if self.smaller else score - best.score
        return gain > self.min_delta


@dataclass(frozen=True)
class BestRecord:
    """The best evaluation so far; `checkpoint` is the name of its folder."""

    run_id: str
    step: int
    checkpoint: str
    score: float
    metric: str
    metrics: dict[str, Any]

    def save(self, folder: CheckpointFolder) -> None:
        publish_json(folder.best_pointer, asdict(self))


def read_best(folder: CheckpointFolder, rule: BestRule) -> BestRecord | None:
    """Return the record that an earlier process wrote, None if there is none.

    A record that is damaged, of another run or metric, or whose checkpoint is gone is ignored with a warning.
    """
    path = folder.best_pointer
    if not path.exists():
        return None
    try:
        record = BestRecord(**read_json(path))
        problem = _problem(record, folder, rule)
    except (OSError, ValueError, TypeError) as error:
        record, problem = None, f"not a record of the best checkpoint ({error})"
    if problem is not None:
        log.warning("%s: ignored: %s", path, problem)
        return None
    return record


def _problem(record: BestRecord, folder: CheckpointFolder, rule: BestRule) -> str | None:
    if (
        not isinstance(record.step, int)
        or not isinstance(record.score, (int, float))
        or not math.isfinite(record.score)
    ):
        return f"expected numbers, found step {record.step!r} and score {record.score!r}"
    checkpoint = folder.final(record.step)
    if record.run_id != folder.run_id or record.checkpoint != checkpoint.name:
        return f"expected run {folder.run_id}, found {record.run_id} and {record.checkpoint}"
    if record.metric != rule.metric:
        return f"expected metric {rule.metric}, found {record.metric}"
    return None if is_complete(checkpoint) else f"{checkpoint} is not a complete checkpoint"


class CheckpointManager:
    """The checkpoints of one run. Every rank has one, on a folder that all ranks see; collectives are marked as such.

    A checkpoint is complete or absent: written to a staging folder, synced, renamed. Saving step N ends the timeline
    there: checkpoints that an abandoned attempt saved at later steps are removed, and with them a best among those.

    Attributes:
        complete_step: step of the newest checkpoint that this process has saved completely; 0 if none.

    Args:
        run_id: a name; two runs in one folder do not touch each other's checkpoints.
        max_checkpoints: how many of the newest to keep, beside the best; 0 keeps all.
        rule: which evaluation is better than another.
        save_async: `save` copies the state and returns; a thread writes it while training continues.

    Raises:
        ConfigError: `run_id` is not a name.
    """

    def __init__(
        self,
        output_dir: Path,
        run_id: str,
        *,
        max_checkpoints: int = 0,
        rule: BestRule | None = None,
        save_async: bool = False,
    ) -> None:
        self.folder = CheckpointFolder(output_dir, run_id)
        self.rule = rule or BestRule()
        self._max_checkpoints = max_checkpoints
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if save_async else None
        self._pending: Future[None] | None = None
        self.complete_step = 0
        # A group of its own: the writer thread communicates while the main thread trains, and gloo needs no GPU.
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if dist.is_initialized() else None
        self.best: BestRecord | None = broadcast_from_rank_0(
            read_best(self.folder, self.rule) if get_rank() == 0 else None, self._group
        )

    def save(self, state: Snapshot, step: int) -> None:
        """Save the state after optimizer step `step`. A collective.

        Raises:
            StoreError: on all ranks, what any rank could not write. Earlier checkpoints are unchanged. With
                `save_async`, the error of the previous save.
        """
        self.wait()
        if self.best is not None and self.best.step >= step:
            self.best = None
        if self._writer is None:
            self._save(state, step)
        else:
            self._pending = self._writer.submit(self._save, state.copy(), step)

    def wait(self) -> None:
        """Wait until everything is written. Raises what failed in the writer thread since the last call."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def is_better(self, metrics: Mapping[str, Any]) -> bool:
        """Whether an evaluation beats the best so far. A collective: rank 0 decides for all.

        Raises:
            ConfigError: the evaluation lacks the deciding metric; on the other ranks a StoreError with the same
                message.
            StoreError: with `save_async`, the error of the previous save.
        """
        self.wait()  # the writer thread uses the same group
        verdict = self._on_all(lambda: self.rule.is_better(metrics, self.best) if get_rank() == 0 else None)
        return broadcast_from_rank_0(verdict, self._group)

    def update_best(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the checkpoint of `step`, which must be saved, as the best. A collective."""
        self.wait()
        score = self.rule.score(metrics)
        if score is None:
            raise ValueError("an empty evaluation cannot be the best")
        name = self.folder.final(step).name
        record = BestRecord(self.folder.run_id, step, name, score, self.rule.metric, dict(metrics))
        self._on_rank_0(lambda: record.save(self.folder))
        self.best = record
        self._on_rank_0(lambda: self._rotate(step))

    def resume(self, checkpoint: Path, step: int) -> None:
        """Continue from a checkpoint, perhaps of another run or folder. A collective.

        A best of later steps, which this timeline has not reached, is forgotten. The best that the other checkpoint's
        run recorded is copied here unless this run has its own, so that a training never ends worse than the best it
        had.
        """
        own = self.folder.holds(checkpoint, step)
        if self.best is not None and (not own or self.best.step > step):
            self.best = None
        if not own:
            self._on_rank_0(lambda: self._adopt_best(checkpoint, step))
            self.best = broadcast_from_rank_0(self.best, self._group)

    def start_over(self) -> None:
        """Forget the best of an attempt that is given up; its checkpoints go when the first one is saved."""
        self.best = None

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints on disk, ascending."""
        return self.folder.steps()

    def latest_dir(self) -> Path | None:
        """Return the newest complete checkpoint. A collective: rank 0 looks."""
        self.wait()
        steps = broadcast_from_rank_0(self.steps() if get_rank() == 0 else None, self._group)
        return self.folder.final(steps[-1]) if steps else None

    def best_dir(self) -> Path | None:
        return None if self.best is None else self.folder.final(self.best.step)

    def _save(self, snapshot: Snapshot, step: int) -> None:
        staging = self.folder.staging(step)
        try:
            self._on_rank_0(lambda: self._prepare(step))
            self._on_all(lambda: save_weights_and_rng(staging, snapshot, get_rank()))
            save_moments(staging, snapshot.moments, self._group)
            self._on_rank_0(lambda: self._write_documents(staging, snapshot))
            sums = self._sync_and_checksum(staging)
            self._on_rank_0(lambda: self._publish(step, snapshot, sums))
            self.complete_step = step
        except StoreError:  # raised on all ranks; a full disk is freed of the partial files
            if get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise

    def _prepare(self, step: int) -> None:
        """End the timeline at `step`, and create its staging folder."""
        self.folder.output_dir.mkdir(parents=True, exist_ok=True)
        self.folder.sweep()
        for later in [found for found in self.folder.steps() if found > step]:
            self.folder.remove(later)
        if self.best is None:
            self.folder.best_pointer.unlink(missing_ok=True)
        self.folder.staging(step).mkdir()
        (self.folder.staging(step) / "optimizer").mkdir()

    def _adopt_best(self, checkpoint: Path, step: int) -> None:
        theirs = CheckpointFolder(checkpoint.parent, read_record(checkpoint).run_id)
        best = read_best(theirs, self.rule)
        if best is None or best.step > step:
            return
        staging = self.folder.staging(best.step)
        self.folder.output_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(theirs.final(best.step), staging)
        self.folder.publish(best.step)
        self.best = replace(best, run_id=self.folder.run_id, checkpoint=self.folder.final(best.step).name)
        self.best.save(self.folder)

    def _write_documents(self, staging: Path, snapshot: Snapshot) -> None:
        for name, document in snapshot.documents.items():
            publish_json(staging / name, document)

    def _sync_and_checksum(self, staging: Path) -> dict[str, FileRecord]:
        """Flush all files and return their sizes and checksums; the ranks share the work."""
        mine = self._on_all(lambda: sync_and_checksum(staging, list_files(staging)[get_rank() :: get_world_size()]))
        return {name: found for share in gather_from_ranks(mine, self._group) for name, found in share.items()}

    def _publish(self, step: int, snapshot: Snapshot, sums: dict[str, FileRecord]) -> None:
        write_record(
            self.folder.staging(step), self.folder.run_id, step, get_world_size(), time.time(), snapshot.state, sums
        )
        self.folder.publish(step)
        self.folder.point_to(self.folder.latest_pointer, step)
        self._rotate(step)

    def _rotate(self, written: int) -> None:
        """Remove the oldest checkpoints beyond `max_checkpoints`; never the best, never the one just written."""
        if not self._max_checkpoints:
            return
        kept = {written} | ({self.best.step} if self.best else set())
        for step in self.folder.steps()[: -self._max_checkpoints]:
            if step not in kept:
                try:
                    self.folder.remove(step)
                except OSError as error:
                    log.warning("checkpoint %s cannot be removed: %s", self.folder.final(step), error)

    def _on_all(self, action: Callable[[], Any]) -> Any:
        return run_on_every_rank(action, self._group)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        run_on_every_rank(action if get_rank() == 0 else _nothing, self._group)


def _nothing() -> None: ...


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
