"""Launch of a program whose work on one partition is shared by several jobs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.capture.software import EnginePython
from draftworks.config.run_files import WORKER_FIGURES, SharedRun
from resources.companions import Companion
from resources.job_claims import CLAIM
from resources.torch_launcher import JobResult, TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import launch, make_companion

FOLDER = "workers"
"""In `var`: the outputs of workers, by asset and target."""
RESTARTS = 10
"""How often a worker that was killed is replaced. The others do its work meanwhile, so this only saves time."""


def launch_workers(
    context: dg.AssetExecutionContext,
    launcher: TorchLauncher,
    workspace: Workspace,
    program: str,
    run: SharedRun,
    processes: int,
    device: str,
    python: EnginePython | None = None,
) -> JobResult:
    """Do as `launch`, with as many jobs as the launcher's settings for this program say (`workers`).

    The first job makes the result; the others take parts of its work, and end when there is none left: several of them are
    one array, where the launcher has arrays. Figures of the report that add up over jobs are those of all.
    """
    place = workspace.resolve_launcher(context.partition_key, program)
    asset = context.asset_key.to_user_string()
    shared = workspace.var / FOLDER / asset / context.partition_key  # not of this run: a scheduler's job may outlive it
    together = shared / f"{program}-workers"
    is_array = place.workers > 2 and launcher.has_arrays(place)
    numbers = range(1, place.workers)
    outs = [together / str(number) if is_array else shared / f"{program}-{number}" for number in numbers]
    for out in outs:
        out.mkdir(parents=True, exist_ok=True)
        if not list(shared.glob(f"{program}-*{CLAIM}")):  # else it may have ended with nobody to read its figures
            (out / WORKER_FIGURES).unlink(missing_ok=True)

    def make_worker(number: int, out: Path, copies: int = 1, restarts: int = 0) -> Companion:
        own, name = run.model_copy(update={"worker": number, "out": out}), out.name
        return make_companion(
            context, workspace, program, own, processes, device, python, False, restarts, name, copies
        )

    if is_array:
        # Copy 0 is worker 1; a copy that was killed is started again within its array.
        beside = [make_worker(1, together, copies=len(outs))]
    else:
        beside = [make_worker(number, out, restarts=RESTARTS) for number, out in zip(numbers, outs, strict=True)]
    result = launch(context, launcher, workspace, program, run, processes, device, python, beside)
    report = _add_figures(result.report, [out / WORKER_FIGURES for out in outs])
    for out in [*outs, together]:
        shutil.rmtree(out, ignore_errors=True)
    return replace(result, report=report)


def _add_figures(report: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Add the figures of other workers; one that was ended before it wrote its file is left out."""
    total = dict(report)
    for file in files:
        figures = json.loads(file.read_text()) if file.exists() else {}
        for name, value in figures.items():
            total[name] += value
    return total
