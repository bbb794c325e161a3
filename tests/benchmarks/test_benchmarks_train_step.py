from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "train_step.py"


def test_prints_a_table_and_one_json_line_per_size(tmp_path):
    command = [sys.executable, str(SCRIPT), "24x2", "--steps", "2", "--ttt", "2", "--json", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    header, row, line = done.stdout.splitlines()
    assert "tokens/s" in header
    assert row.split()[0] == "24x2"
    result = json.loads(line)
    assert result["tokens_per_s"] > 0
    assert result["peak_rss_mb"] > 50
    assert (tmp_path / "out.jsonl").read_text() == line + "\n"
