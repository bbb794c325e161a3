"""What starts by itself. Off by default: switch a sensor on in the UI."""

from __future__ import annotations

from sensors.registry import registry_sensor


def all_sensors() -> list:
    return [registry_sensor]
