"""Targets with a run that is queued or running. Sensors and schedules skip them."""

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
