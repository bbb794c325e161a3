from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "evaluation.py"


@pytest.mark.long
def test_prints_a_table_and_one_json_line():
    command = [sys.executable, str(SCRIPT), "--length", "24", "--batch", "2", "--ttt", "2", "--repeats", "2"]
    header, row, line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "ratio" in header
    assert row.split()[0] == "24x2"
    assert json.loads(line)["replay_ms"] > 0
