"""`python -m jobs.run`: exit codes, and the reason as the last line."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from jobs.run import FAILED, MISUSED, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def location(tmp_path):
    """A code location whose only target has no data."""
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    (tmp_path / "registry" / "targets" / "small.yaml").write_text("model: /nowhere\ndataset: chats\n")
    path = tmp_path / "location.py"
    path.write_text(
        "from pathlib import Path\nfrom spec_assets.code_location import build_definitions\n"
        "defs = build_definitions(Path(__file__).parent / 'registry')\n"
    )
    return path


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))


def test_an_unknown_job_is_told_with_those_there_are(location, capsys):
    assert main(["prepre", "--target", "small", "-f", str(location)]) == MISUSED
    told = capsys.readouterr().err
    assert told == "error: no job prepre; did you mean prepare?\n"


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("train_dflash", "no target of the registry uses dflash"),
        ("promote_dflash", "no target of the registry uses dflash"),
        ("promote_eagle3", ""),
    ],
)
def test_a_job_of_a_strategy_that_no_target_uses_is_told_so(location, capsys, job, told):
    assert main([job, "--target", "small", "-f", str(location)]) == MISUSED
    said = capsys.readouterr().err
    assert f"error: no job {job}" in said
    assert told in said
    assert told or "of the registry uses" not in said


def test_a_run_config_with_an_unknown_key_is_told_without_a_traceback(location, capsys, tmp_path):
    (tmp_path / "more.yaml").write_text("opps: {}\n")
    assert main(["prepare", "--target", "small", "-f", str(location), "-c", str(tmp_path / "more.yaml")]) == MISUSED
    told = capsys.readouterr().err
    assert "opps" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "reason"),
    [([], "the run has no target: expected the tag dagster/partition"), (["--target", "smal"], "did you mean small?")],
)
def test_a_run_without_a_target_or_with_an_unknown_one_fails_in_one_line(location, words, reason, capfd):
    assert main(["prepare", "-f", str(location), *words]) == FAILED
    told = [
        line for line in capfd.readouterr().err.splitlines() if "Warning" not in line and "return callback" not in line
    ]
    assert len(told) == 1
    assert reason in told[0]
    with dg.DagsterInstance.get() as instance:
        assert {run.status for run in instance.get_runs()} <= {dg.DagsterRunStatus.FAILURE}
