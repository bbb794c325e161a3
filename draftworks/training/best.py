"""The best checkpoint of a run: the rule that compares evaluations, and the record beside the checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.errors import ConfigError
from draftworks.evaluation.result import BLOCK_METRIC, WALK_METRIC, find_metric
from draftworks.storage.atomic import publish_json
from draftworks.storage.regular_files import read_json
from draftworks.storage.suggestions import suggest_or_list
from draftworks.training.checkpoint_files import CheckpointFolder, is_complete

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
