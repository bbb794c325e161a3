"""Reads `deploy/` as those do who use it: units as systemd, the environment as a shell."""

from __future__ import annotations

import shlex
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
DEPLOY = CHECKOUT / "deploy"
UNITS = tuple(sorted(path.name for path in (DEPLOY / "systemd").glob("*.service")))


@dataclass(frozen=True)
class Unit:
    """A unit's command as words, its other settings of [Service], and the units it starts after."""

    command: list[str]
    settings: dict[str, str]
    after: list[str]


def read_unit(name: str) -> Unit:
    parser = RawConfigParser(strict=True)
    parser.optionxform = str
    parser.read(DEPLOY / "systemd" / name)
    settings = dict(parser["Service"])
    return Unit(shlex.split(settings["ExecStart"]), settings, parser["Unit"]["After"].split())


def read_environment() -> dict[str, str]:
    """Return the variables of the example of an environment file."""
    lines = (DEPLOY / "draftworks.env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
