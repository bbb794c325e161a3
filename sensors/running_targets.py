"""Targets with a run that is queued or running, and the series of a tick. Sensors and schedules skip them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import dagster as dg

PARTITION_TAG = "dagster/partition"
UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def find_runs_under_way(instance: dg.DagsterInstance, besides: Collection[str] = ()) -> dict[str, dg.DagsterRun]:
    """Return a queued or running run for each target that has one.

    Args:
        besides: jobs that do not count.
    """
    runs = instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY))
    return {run.tags[PARTITION_TAG]: run for run in runs if PARTITION_TAG in run.tags and run.job_name not in besides}


def describe_run(run: dg.DagsterRun) -> str:
    """Return id, job and status of a run for a log line."""
    return f"run {run.run_id[:8]} of {run.job_name} is {run.status.value.lower()}"


_SERIES = "*"
"""Key of the series in a cursor, which no target can be named."""


@dataclass(frozen=True)
class SeriesCursor:
    """A sensor's cursor: what it remembers by name, and the series of its run keys.

    Attributes:
        series: empty in a cursor of before there were series, whose keys stay as they were.
    """

    series: str
    entries: dict[str, Any]

    @classmethod
    def read(cls, cursor: str | None) -> SeriesCursor:
        if not cursor:
            return cls(uuid.uuid4().hex[:8], {})
        entries = json.loads(cursor)
        return cls(entries.pop(_SERIES, ""), entries)

    def write(self, entries: dict[str, Any]) -> str:
        """Return the cursor with these entries and the same series."""
        return json.dumps({**entries, **({_SERIES: self.series} if self.series else {})}, sort_keys=True)

    def name_run(self, *parts: object) -> str:
        """Return the run key of these parts."""
        return ":".join(str(part) for part in (*parts, *([self.series] if self.series else [])))
