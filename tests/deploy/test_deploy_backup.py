"""Dagster's database after a loss: the commands of docs/operations.md, as they stand there, on a real Postgres."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from deploy_toys import DEPLOY
from documents import ROOT, Block, blocks
from postgres_server import DATABASE, postgres_server

pytestmark = pytest.mark.cluster
OPERATIONS = [block for block in blocks("bash") if block.path == ROOT / "docs" / "operations.md"]


def find_block(word: str) -> Block:
    """The first block of the page in which a word stands."""
    return next(block for block in OPERATIONS if word in block.text)


def lines_of(block: Block, *programs: str) -> str:
    """The lines of a block that begin with one of these programs."""
    return "\n".join(line for line in block.text.splitlines() if line.startswith(programs))


@dg.asset(pool="gpu")
def kept() -> None:
    """Something that was made once."""


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").symlink_to(DEPLOY / "dagster.yaml")
    return tmp_path / "home"


def test_a_restored_dump_has_runs_events_and_places_and_is_up_to_date(home, tmp_path, monkeypatch):
    def run(commands: str) -> None:
        """Run them in a shell that has the server's programs, and ours."""
        assert commands
        paths = [str(server.locate("psql").parent), str(Path(sys.executable).parent), os.environ["PATH"]]
        commands = commands.replace("/backup", str(tmp_path)).replace(".venv/bin/", "")
        environment = {**server.client_environment, "PATH": os.pathsep.join(paths), "DAGSTER_HOME": str(home)}
        subprocess.run(["bash", "-e"], input=commands, cwd=tmp_path, env=environment, text=True, check=True)

    with postgres_server() as server:
        for name, value in {**server.variables, "DRAFTWORKS_COMPUTE_LOGS": str(tmp_path / "logs")}.items():
            monkeypatch.setenv(name, value)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.event_log_storage.set_concurrency_slots("gpu", 3)
            made = dg.materialize([kept], instance=instance)
            events = len(instance.all_logs(made.run_id))

        for name in ("reports/current.json", "feature_store/shard", "runs/log"):
            (tmp_path / "var" / name).parent.mkdir(parents=True)
            (tmp_path / "var" / name).write_text(name)
        run(lines_of(find_block("pg_dump"), "tar", "pg_dump"))
        server.run("dropdb", "--maintenance-db=postgres", DATABASE)
        shutil.rmtree(tmp_path / "var")
        run(lines_of(find_block("pg_restore"), "createdb", "pg_restore", "tar"))
        assert [path.name for path in (tmp_path / "var").rglob("*")] == ["reports", "current.json"]
        run(lines_of(find_block("instance migrate"), ".venv/bin/dagster"))

        with dg.DagsterInstance.from_config(str(home)) as instance:
            assert instance.get_run_by_id(made.run_id).is_success
            assert len(instance.all_logs(made.run_id)) == events
            assert instance.get_latest_materialization_event(dg.AssetKey("kept")) is not None
            assert instance.event_log_storage.get_concurrency_info("gpu").slot_count == 3
