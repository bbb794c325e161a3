"""Sensors and schedules.
 They are off by default. `automation: true` in registry/deployment.yaml starts the re-evaluation by changes and by
time. A switch in the UI takes precedence."""

from __future__ import annotations

import dagster as dg

from draftworks.targets.registry import Registry
from sensors.reevaluation import reevaluation_sensor
from sensors.registry import registry_sensor
from sensors.schedules import evaluation_schedules


def all_sensors(registry: Registry) -> list[dg.SensorDefinition]:
    deployment = registry.load_deployment()
    status = dg.DefaultSensorStatus.RUNNING if deployment.automation else dg.DefaultSensorStatus.STOPPED
    return [
        registry_sensor(registry.list_targets()),
        reevaluation_sensor(registry.list_targets(), status, deployment.reevaluation_interval_s),
    ]


def all_schedules(registry: Registry) -> list[dg.ScheduleDefinition]:
    automation = registry.load_deployment().automation
    return evaluation_schedules(
        registry, dg.DefaultScheduleStatus.RUNNING if automation else dg.DefaultScheduleStatus.STOPPED
    )
