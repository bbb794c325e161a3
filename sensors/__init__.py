"""Sensors and schedules.

Those that start runs are off by default. `automation: true` in registry/deployment.yaml turns on the re-evaluation after
changes and on schedule, and a launcher whose jobs live in a scheduler the sensor that ends those without a run;
`retention.cron` turns on the schedule that prunes, `budget` the sensor that acts on decisions, `notifications` the one that
tells people. The sensor that frees pool slots is on. A switch in the UI takes precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from draftworks.targets.registry import Registry
from sensors.notifications import make_notification_sensor
from sensors.observation import make_observe_sensors
from sensors.orphans import make_orphan_sensor, make_pool_slot_sensor
from sensors.reevaluation import make_reevaluation_sensor, make_registry_sensor
from sensors.schedules import make_evaluation_schedules, make_fleet_schedule, make_prune_schedules


def make_sensors(
    registry: Registry, acting: Sequence[Any] = (), decided: Sequence[str] = ()
) -> list[dg.SensorDefinition]:
    """Return all sensors.

    Args:
        acting: jobs that decisions start, see `sensors.acting`; none where no entry has a decision.
        decided: the strategies that have these jobs.
    """
    deployment = registry.load_deployment()
    status = dg.DefaultSensorStatus.RUNNING if deployment.automation else dg.DefaultSensorStatus.STOPPED
    return [
        make_registry_sensor(registry.list_targets()),
        make_reevaluation_sensor(registry.list_targets(), status, deployment.reevaluation_interval_s),
        make_orphan_sensor(registry),
        make_pool_slot_sensor(),
        *(_make_decision_sensors(registry, acting, decided) if acting else ()),
        make_notification_sensor(registry),
        *make_observe_sensors(registry),
    ]


def _make_decision_sensors(
    registry: Registry, acting: Sequence[Any], decided: Sequence[str]
) -> list[dg.SensorDefinition]:
    from sensors.acting import make_decision_sensors  # where no entry has a decision, loading imports nothing of them

    return make_decision_sensors(registry, acting, decided)


def make_schedules(registry: Registry) -> list[dg.ScheduleDefinition]:
    automation = registry.load_deployment().automation
    status = dg.DefaultScheduleStatus.RUNNING if automation else dg.DefaultScheduleStatus.STOPPED
    return [*make_evaluation_schedules(registry, status), *make_prune_schedules(registry), make_fleet_schedule(status)]
