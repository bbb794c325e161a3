"""The benchmark of a GPU, on a CPU at small sizes, as on a machine that has the engine alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import gpu
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
ABSENT = ["dagster", "dagster_pipes", "pyarrow", "pandas", "matplotlib", "httpx", "psutil", "tenacity"]
ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))  # importing one of them fails now
sys.argv = sys.argv[1:]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
SMALL = gpu.Case("tiny", (24, 12), "bfloat16", "auto", False, steps=1, warm_up=0)


@pytest.mark.long
def test_prints_tables_and_writes_json_where_there_is_no_dagster(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--strategy", "dflash", "--length", "24", "--batch", "2", "--steps", "2"]
    command = [sys.executable, "-c", ALONE, str(SCRIPT), *options, "--warm-up", "1", "--device", "cpu"]
    command += ["--peak-tflops", "2", "--json", str(tmp_path / "out.jsonl")]
    paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "peak 2 TFLOP/s" in done.stdout
    assert done.stdout.count("dflash") == 6
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    compared = [line["difference"] for line in lines if "difference" in line]
    assert [(one["dtype"], one["layout"]) for one in compared] == [
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("padded", "packed")
    ]
    assert max(one["loss"] for one in compared[:2]) < 1e-5 < compared[2]["gradient"] < 0.01
    steps = [line["step"] for line in lines if "step" in line]
    assert [one["layout"] for one in steps] == ["padded", "packed"]
    for one in steps:
        seconds = one["times"]["step_ms"] / 1e3
        assert one["tokens_per_s"] == pytest.approx(36 / seconds)
        assert one["mfu"] == pytest.approx(one["tflop"] / seconds / 2)


@pytest.mark.parametrize("where", ["trainer_core", "measure"])
def test_what_does_not_fit_is_told_and_the_next_one_measured(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    plain, calls = getattr(gpu, where), []

    def full_at_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return plain(*args)

    monkeypatch.setattr(gpu, where, full_at_first)
    padded, packed = gpu.measured(["dflash"], SMALL, torch.device("cpu"), None)
    assert gpu.result_row(padded).split(maxsplit=2) == ["dflash", "padded", "CUDA out of memory"]
    assert packed.times is not None
    assert gpu.result_row(packed).split()[-1] == "–"


def test_requirements_of_a_gpu_machine_are_the_projects_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["test"]}
    lines = (ROOT / "tools" / "gpu-requirements.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} <= known
