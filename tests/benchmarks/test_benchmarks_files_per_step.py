"""A reader who follows one packed EAGLE-3 optimizer step opens at most 14 product files, none over 450 lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "files_per_step.py"
MOST_FILES = 14
MOST_LINES = 450
"""As the layout test has it for every file."""


def test_one_packed_step_enters_few_files_and_no_long_one(tmp_path: Path) -> None:
    out = tmp_path / "files.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--json", str(out)], capture_output=True, text=True, check=True)
    files = json.loads(out.read_text())
    paths = [file["path"] for file in files]
    assert len(paths) <= MOST_FILES, done.stdout
    assert max(file["lines"] for file in files) <= MOST_LINES, done.stdout
    # The hook saw forward, loss, backward and optimizer: otherwise a small number would mean nothing.
    for part in ("drafts/documents.py", "eagle3/attention.py", "eagle3/loss.py", "training/optimizer.py"):
        assert any(path.endswith(part) for path in paths), done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{len(paths)} files")
