from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "report_again.py"


@pytest.mark.slow
def test_a_report_that_is_made_again_runs_no_pass_of_the_target(finished_site):
    (run_file,) = finished_site.var.glob("runs/*/eagle3_report/run.yaml")
    command = [sys.executable, str(SCRIPT), str(run_file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    passes = [cost["target_passes"] for cost in json.loads(lines[-1])]
    assert passes[0] == passes[2] == passes[3] == 0 < passes[1]
