"""The benchmark of the control plane, with few references."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import control_plane
import pytest
from typer.testing import CliRunner


def test_every_reference_passes_every_phase(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(control_plane.main)
    options = ["--count", "1500", "--batch", "200", "--step", "64", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    phases = {phase: [row for row in found["rows"] if row["phase"] == phase] for phase in ("commit", "read, ack")}
    for rows in phases.values():
        assert len(rows) == control_plane.POINTS
        assert rows[-1]["refs"] == 1500
    assert found["rows"][-1]["phase"] == "restart"
    slim = found["slim"]
    assert slim["slim_bytes"] < slim["json_bytes"] / 3
    assert "total" in done.output


@pytest.mark.long
def test_a_million_references_pass_at_flat_memory(tmp_path: Path) -> None:
    found = tmp_path / "out.json"
    subprocess.run([sys.executable, control_plane.__file__, "--json", str(found)], check=True, timeout=3000)
    rows = json.loads(found.read_text())["rows"]
    begun = next(row for row in rows if row["phase"] == "commit")
    assert rows[-1]["refs"] == 1_000_000
    assert rows[-1]["peak_mib"] < 1.2 * begun["peak_mib"]
