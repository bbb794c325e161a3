from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kill_training.py"


@pytest.mark.long
def test_killed_training_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "8", "--json", str(tmp_path / "kills.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "kills.json").read_text())
    assert len(result["kills"]) == 8
    assert result["finished"] >= 1
    assert "evaluation" in done.stdout.splitlines()[0]
    assert json.loads(done.stdout.splitlines()[-1]) == result
