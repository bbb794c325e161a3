"""The benchmarks of capture, small."""

from __future__ import annotations

import json
from pathlib import Path

import capture_client
import overlap
import typer
from typer.testing import CliRunner


def run(main, *options: str) -> dict:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])


def test_the_client_is_measured_without_a_server(tmp_path: Path):
    options = ("--samples", "3", "--length", "16", "--hidden", "32", "--turns", "2", "--folder", str(tmp_path))
    found = run(capture_client.main, *options)
    assert len(found["tokens_per_core_s"]) == 2
    assert min(found["tokens_per_core_s"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_overlap_is_measured_for_both_ways():
    """Nothing is faster than the pauses; how much slower is the machine's matter."""
    found = run(overlap.main, "--batches", "4", "--seconds", "0.05", "--turns", "1")
    assert found["stored"][0] >= 1
    assert found["streamed"][0] > 0.5
    assert found["trainer alone / pauses"][0] >= 1
