"""An instance that cannot be opened is one line of `python -m jobs.run`, with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.instance_problems import describe_instance_problem
from jobs.run import FAILED, MISUSED, main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VARIABLES = {"HOST": "127.0.0.1", "PORT": "1", "USER": "somebody", "PASSWORD": "hidden word", "DB": "dagster"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    (tmp_path / "dagster.yaml").symlink_to(DEPLOY / "dagster.yaml")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTWORKS_COMPUTE_LOGS", str(tmp_path / "logs"))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", value)
    return tmp_path


@pytest.fixture
def last_line(tmp_path, capsys):
    """Runs a job that is never reached, and returns the last line."""
    (tmp_path / "location.py").write_text(
        "import dagster as dg\n@dg.asset\ndef one(): ...\n"
        "defs = dg.Definitions([one], jobs=[dg.define_asset_job('make')])\n"
    )

    def run() -> str:
        assert main(["make", "-f", str(tmp_path / "location.py")]) in (FAILED, MISUSED)
        said = capsys.readouterr().err
        assert "hidden word" not in said
        return said.splitlines()[-1]

    return run


def test_a_variable_that_is_not_set(last_line, home, monkeypatch):
    monkeypatch.delenv("DAGSTER_PG_PASSWORD")
    assert last_line() == (
        f"error: {home}/dagster.yaml: the environment variable DAGSTER_PG_PASSWORD is not set; "
        "deploy/draftworks.env.example has all of them"
    )


def test_a_library_that_is_not_installed(last_line, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "dagster_postgres", None)
    assert last_line() == (
        f"error: {home}/dagster.yaml: expected Dagster's Postgres library, found none: "
        "pip install -c constraints.txt -e '.[postgres]'"
    )


def test_a_database_that_does_not_answer(last_line, monkeypatch):
    monkeypatch.setattr("dagster_postgres.utils.time.sleep", lambda _: None)
    said = last_line()
    assert 'Dagster\'s database does not answer: connection to server at "127.0.0.1", port 1 failed' in said


def test_sqlalchemy_of_another_version_and_errors_of_other_kinds():
    told = describe_instance_problem(ModuleNotFoundError("No module named 'psycopg'", name="psycopg"))
    assert told is not None
    assert "SQLAlchemy before 2.1" in told
    assert describe_instance_problem(ValueError("something else")) is None
