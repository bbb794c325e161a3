from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "objective_memory.py"


@pytest.mark.long
def test_prints_a_table_with_what_a_label_costs_and_one_json_line_per_size(tmp_path: Path) -> None:
    sizes = ["--strategies", "domino", "--samples", "1", "--samples", "2", "--vocab", "512", "--length", "24"]
    command = [sys.executable, str(SCRIPT), *sizes, "--json", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    header, first, second, *lines = done.stdout.splitlines()
    assert "logits MiB" in header
    assert (first.split()[:3], second.split()[:3]) == (["domino", "512", "1"], ["domino", "512", "2"])
    one, two = map(json.loads, lines)
    assert 0 < one["evaluate_mib"] < one["train_mib"] < two["train_mib"]
    assert float(second.split()[5]) > 0
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines
