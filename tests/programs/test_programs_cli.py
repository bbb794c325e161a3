"""Output of the command line: whole names, and a strategy's own metrics."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from draftworks.programs.cli import app, build_strategy_metrics_table
from draftworks.programs.keys import list_keys
from draftworks.storage.artifacts import Artifact


def test_no_key_is_cut_off_where_the_output_goes_into_a_file():
    words = CliRunner().invoke(app, ["keys"]).stdout.split()
    assert [key.name for key in list_keys("target") if key.name not in words] == []


def test_figures_that_a_strategy_has_alone_stand_beside_their_names():
    heldout = {"eval/avg_acc": 0.9, "eval/tau": 0.25, "eval/confidence_error": [0.125, 0.5]}
    draft = Artifact(
        "dspark_draft", "small", Path("draft"), {}, "v", {"heldout": heldout}, {}, created=0.0, seconds=0.0
    )
    shown = io.StringIO()
    Console(file=shown, width=100).print(build_strategy_metrics_table("dspark", draft))
    lines = [line.replace("│", " ").split() for line in shown.getvalue().splitlines()]
    assert ["tau", "0.250"] in lines
    assert ["confidence_error", "0.125", "0.500"] in lines
    assert not any("avg_acc" in line for line in lines)
