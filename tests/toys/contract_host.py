"""A Dagster process of its own that launches a contract worker, for tests that interrupt or kill it, or start it twice.

    python contract_host.py HARNESS FOLDER TASK

`HARNESS` is `module:class` of a `LauncherHarness`; the report, or the failure, is written to `FOLDER/outcome.PID`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import dagster as dg
from launcher_contract import LauncherHarness, make_job


def run(harness: LauncherHarness, task: str, options: dict) -> None:
    launcher = harness.make_launcher(**options)

    @dg.asset
    def draft(context) -> dg.MaterializeResult:
        job = launcher.run(context, make_job(harness, task, **options), run_dir=harness.folder / "runs")
        (harness.folder / f"outcome.{os.getpid()}").write_text(json.dumps(job.report))
        return dg.MaterializeResult()

    dg.materialize([draft])


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    run(getattr(importlib.import_module(module), name)(Path(sys.argv[2])), sys.argv[3], json.loads(sys.argv[4]))
