from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.long
def test_prints_a_table_and_one_json_line(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--megabytes", "1", "--repeats", "1", "--folder", str(tmp_path)]
    header, row, line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "save s" in header
    assert float(row.split()[0]) == json.loads(line)["megabytes"] > 1
    assert not any(tmp_path.iterdir())
