"""`draftworks doctor`: whether this installation is sound, and what to do where it is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.doctor import LIMIT_S, Installation, probe_ui_port
from draftworks.preflight.installation.machine_probes import Probe, run_probes
from draftworks.programs.start import CHECKOUT, LOOPBACK, build_dagster_environment, is_port_free
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry

UI_PORT = 3000
_WIDEST_STATE = len("warning")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    port: Annotated[int, typer.Option(help="Of the UI.")] = UI_PORT,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which a probe counts as hanging.")] = LIMIT_S,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Examine this installation: versions, disk, GPU, SGLang, permissions, Dagster, clocks, storage, secrets.

    Every line is ok, a warning or an error, with what to do. Nothing is changed; secrets are never shown. Exit code 1
    with an error, else 0. `draftworks check` looks at the targets.
    """
    installation = Installation(Registry(registry), build_dagster_environment(), CHECKOUT)
    lines = installation.examine(limit)
    lines += run_probes([Probe("ports", lambda: probe_ui_port(port, is_port_free(port), LOOPBACK))], limit)
    problems, warnings = (sum(line.severity == state for line in lines) for state in ("error", "warning"))
    if as_json:
        found = {"problems": problems, "warnings": warnings, "lines": [asdict(line) for line in lines]}
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in lines:
            _print_line(line)
        typer.echo(f"{format_count(problems, 'problem')}, {format_count(warnings, 'warning')}")
    if problems:
        raise typer.Exit(1)


def _print_line(line: Finding) -> None:
    found = "\n           ".join(line.text.splitlines())
    typer.echo(f"{line.severity:<{_WIDEST_STATE}}  {line.where}: {found}")
    if line.remedy:
        typer.echo(f"{'':<{_WIDEST_STATE}}  -> {line.remedy}")
