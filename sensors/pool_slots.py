"""The sensor that frees pool slots of runs that have ended, those not whose job lives on in a scheduler.

Dagster's daemon can free slots too (`run_monitoring.free_slots_after_run_end_seconds`), but it knows of no job that outlives
its run: the next run would get a GPU that is in use. So the shipped configurations leave that to this sensor.
"""

from __future__ import annotations

import dagster as dg

from draftworks.storage.words import format_count
from resources.dead_runs import release_dead_runs

INTERVAL_S = 30
ENDED_FOR_S = 30.0
"""Seconds after the end of a run in which its processes may still be ending."""


def make_pool_slot_sensor() -> dg.SensorDefinition:
    """Return the sensor. It is on: without it, a killed run would keep its slots until the next run begins."""

    @dg.sensor(
        name="pool_slot_sensor",
        minimum_interval_seconds=INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Frees pool slots of runs that have ended or were killed, unless a job of theirs lives in a scheduler.",
    )
    def free_pool_slots(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        found = release_dead_runs(context.instance, wait_s=0.0, ended_for_s=ENDED_FOR_S)
        for run_id in found.released:
            context.log.info(f"the pool slots of run {run_id} are free")
        reason = (
            f"freed the pool slots of {format_count(len(found.released), 'run')}; "
            f"a job of {format_count(len(found.kept), 'run')} lives"
        )
        return dg.SensorResult(skip_reason=reason)

    return free_pool_slots
