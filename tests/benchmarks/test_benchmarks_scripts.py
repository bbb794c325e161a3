"""Benchmarks that are scripts, on small cases: each prints a table, and a line of JSON for each row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_training import write_random_training

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MOST_FILES = 14
MOST_LINES = 450
"""As the layout test has it for every file."""


def run(name: str, *options: str | Path) -> list[str]:
    """Return what a script prints, line by line."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_prints_a_table_and_one_json_line_per_size(tmp_path: Path):
    header, row, line = run("train_step", "24x2", "--steps", "2", "--ttt", "2", "--json", tmp_path / "out.jsonl")
    assert "tokens/s" in header
    assert row.split()[0] == "24x2"
    result = json.loads(line)
    assert result["tokens_per_s"] > 0
    assert result["peak_rss_mb"] > 50
    assert (tmp_path / "out.jsonl").read_text() == line + "\n"


@pytest.mark.long
def test_a_checkpoint_is_measured_and_nothing_stays(tmp_path: Path):
    header, row, line = run("checkpoint", "--megabytes", "1", "--repeats", "1", "--folder", tmp_path)
    assert "save s" in header
    assert float(row.split()[0]) == json.loads(line)["megabytes"] > 1
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_an_evaluation_is_measured():
    header, row, line = run("evaluation", "--length", "24", "--batch", "2", "--ttt", "2", "--repeats", "2")
    assert "ratio" in header
    assert row.split()[0] == "24x2"
    assert json.loads(line)["replay_ms"] > 0


@pytest.mark.long
def test_prints_a_table_with_what_a_label_costs_and_one_json_line_per_size(tmp_path: Path):
    sizes = ["--strategies", "domino", "--samples", "1", "--samples", "2", "--vocab", "512", "--length", "24"]
    header, first, second, *lines = run("objective_memory", *sizes, "--json", tmp_path / "out.jsonl")
    assert "logits MiB" in header
    assert (first.split()[:3], second.split()[:3]) == (["domino", "512", "1"], ["domino", "512", "2"])
    one, two = map(json.loads, lines)
    assert 0 < one["evaluate_mib"] < one["train_mib"] < two["train_mib"]
    assert float(second.split()[5]) > 0
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines


@pytest.mark.long
def test_killed_training_loses_nothing(tmp_path: Path):
    header, *_, line = run("kill_training", "--kills", "8", "--json", tmp_path / "kills.json")
    result = json.loads((tmp_path / "kills.json").read_text())
    assert len(result["kills"]) == 8
    assert result["finished"] >= 1
    assert "evaluation" in header
    assert json.loads(line) == result


@pytest.mark.long
def test_packed_and_padded_learn_the_same_and_only_one_pads(tmp_path: Path):
    run_file = write_random_training(tmp_path, steps=2).save(tmp_path / "run.yaml")
    lines = run("packing", run_file, "--steps", "2", "--json", tmp_path / "out")
    padded, packed = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert (padded["what"], packed["what"]) == ("padded", "packed")
    assert padded["fill"] < packed["fill"] == 1
    assert min(padded["supervised_per_s"], packed["supervised_per_s"]) > 0
    (said,) = (line for line in lines if line.startswith("largest difference"))
    assert float(said.split(":")[1].split()[0]) < 1e-4


def test_one_packed_step_enters_few_files_and_no_long_one(tmp_path: Path):
    """What a reader opens who follows an optimizer step of EAGLE-3."""
    lines = run("files_per_step", "--json", tmp_path / "files.json")
    files = json.loads((tmp_path / "files.json").read_text())
    paths = [file["path"] for file in files]
    assert len(paths) <= MOST_FILES, lines
    assert max(file["lines"] for file in files) <= MOST_LINES, lines
    # The hook saw forward, loss, backward and optimizer: otherwise a small number would mean nothing.
    for part in ("drafts/documents.py", "eagle3/attention.py", "eagle3/loss.py", "training/optimizer.py"):
        assert any(path.endswith(part) for path in paths), lines
    assert lines[-1].startswith(f"{len(paths)} files")
