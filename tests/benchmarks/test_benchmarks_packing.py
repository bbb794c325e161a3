from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.long
def test_both_sides_learn_the_same_and_only_one_pads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from random_training import write_random_training

    run_file = write_random_training(tmp_path, steps=2).save(tmp_path / "run.yaml")
    command = [
        sys.executable,
        str(BENCHMARKS / "packing.py"),
        str(run_file),
        "--steps",
        "2",
        "--json",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    padded, packed = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert (padded["what"], packed["what"]) == ("padded", "packed")
    assert padded["fill"] < packed["fill"] == 1
    assert min(padded["supervised_per_s"], packed["supervised_per_s"]) > 0
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("largest difference"))
    assert float(said.split(":")[1].split()[0]) < 1e-4
