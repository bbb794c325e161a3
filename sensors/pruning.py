"""The schedule on which results that nothing needs are removed."""

from __future__ import annotations

import dagster as dg

from draftworks.targets.registry import Registry


def make_prune_schedules(registry: Registry) -> list[dg.ScheduleDefinition]:
    """Return the schedule of `retention.cron`, switched on; none if it is not set."""
    cron = registry.load_deployment().retention.cron
    if cron is None:
        return []
    return [
        dg.ScheduleDefinition(
            name="prune_by_schedule",
            job_name="prune",
            cron_schedule=cron,
            run_config={"ops": {"prune_results": {"config": {"remove": True}}}},
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description="Removes what no result in use was made from; see docs/how-to/retention.md.",
        )
    ]
