"""Output of the command line: whole names, and a strategy's own metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftworks.evaluation.report.text_tables import render_text_table
from draftworks.programs.cli import COMMANDS, LazyCommand, app
from draftworks.programs.keys import list_keys
from draftworks.programs.summary import build_sampled_table, build_strategy_metrics_table
from draftworks.storage.artifacts import Artifact

HEAVY = [
    "torch",
    "numpy",
    "dagster",
    "transformers",
    "pyarrow",
    "httpx",
    "yaml",
    "draftworks.config",
    "draftworks.targets",
]
"""Nothing of these is needed to say what there is."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_commands_says_of_each_what_its_own_begins_with(name):
    command = LazyCommand(name, COMMANDS[name]).load()
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].help


def test_help_and_unknown_commands_import_none_of_what_commands_need():
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app\n"
        "for words, code in ((['--help'], 0), (['run', '--help'], 0), (['targets'], 2)):\n"
        "    assert CliRunner().invoke(app, words).exit_code == code, words\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_key_is_cut_off_where_the_output_goes_into_a_file():
    words = CliRunner().invoke(app, ["keys"]).stdout.split()
    assert [key.name for key in list_keys("target") if key.name not in words] == []


def test_figures_that_a_strategy_has_alone_stand_beside_their_names():
    heldout = {"eval/avg_acc": 0.9, "eval/tau": 0.25, "eval/confidence_error": [0.125, 0.5]}
    draft = Artifact(
        "dspark_draft", "small", Path("draft"), {}, "v", {"heldout": heldout}, {}, created=0.0, seconds=0.0
    )
    shown = render_text_table(build_strategy_metrics_table("dspark", draft))
    lines = [line.split() for line in shown.splitlines()]
    assert ["sampled_acceptance_length", "1.250"] in lines
    assert ["confidence_error", "0.125", "0.500"] in lines
    assert not any("avg_acc" in line for line in lines)
    assert "rejection at temperature 1 (SGLang 0.5.23)" in " ".join(shown.split())


def test_acceptance_above_temperature_0_is_shown_with_rule_and_servers_side_by_side():
    metrics = {
        "eval/simulated_acc_len": 0.8,
        "eval/simulated_acc_len_t0.7_greedy_draft": 0.5,
        "eval/rung4_loop_t0.7_greedy_draft_acc_len": 0.25,
        "eval/simulated_acc_len_t0.7_rejection": 0.75,
    }
    summary = {"drafts": {"trained": metrics}}
    report = Artifact("dspark_report", "small", Path("report"), {}, "v", summary, {}, created=0.0, seconds=0.0)
    rows = build_sampled_table("dspark", report).rows
    assert rows == (
        ("temperature 0.7", "greedy_draft", "vLLM 0.33", "1.500", "1.250"),
        ("temperature 0.7", "rejection", "SGLang 0.5.23", "1.750", ""),
    )
