"""Which targets somebody is at work on: what starts by itself leaves those alone, whoever started it."""

from __future__ import annotations

from collections.abc import Collection

import dagster as dg

PARTITION_TAG = "dagster/partition"
UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def runs_under_way(instance: dg.DagsterInstance, besides: Collection[str] = ()) -> dict[str, dg.DagsterRun]:
    """By target, a run that is queued or working on it.

    Args:
        besides: jobs that do not count.
    """
    runs = instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY))
    return {run.tags[PARTITION_TAG]: run for run in runs if PARTITION_TAG in run.tags and run.job_name not in besides}


def told(run: dg.DagsterRun) -> str:
    """A run by its name, for a line of a log."""
    return f"run {run.run_id[:8]} of {run.job_name} is {run.status.value.lower()}"
