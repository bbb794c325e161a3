"""Dagster's instance and the code location, as a program of their own reports them: the engine imports no Dagster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile

from draftworks.preflight.installation.probes import Line

DAGSTER = "dagster"
PROGRAM = "jobs.instance_report"


def probe_dagster(registry: Path, env: Mapping[str, str], checkout: Path, limit_s: float) -> Iterator[Line]:
    """Yield the lines of `python -m jobs.instance_report`; those that it wrote in time, where it takes too long."""
    started = time.monotonic()
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(registry)],
            env=dict(env),
            cwd=checkout,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        out.seek(0)
        errors.seek(0)
        lines = [line for line in map(_parse, out.read().decode(errors="replace").splitlines()) if line is not None]
        last = (errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
    yield from lines
    if code is None:
        todo = "is its database, or this machine, busy? dagster instance info shows the instance"
        waited = time.monotonic() - started
        yield Line(DAGSTER, "warning", f"instance and code location were not looked at within {waited:.0f} s", todo)
    elif code:
        yield Line(
            DAGSTER, "problem", f"Dagster cannot be looked at: {last}", "look at: python -m jobs.instance_report"
        )


def _parse(text: str) -> Line | None:
    """Return a line of the program; None for what libraries print."""
    try:
        return Line(**json.loads(text))
    except (ValueError, TypeError):
        return None
