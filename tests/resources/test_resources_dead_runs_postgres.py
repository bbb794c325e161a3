"""Pool slots of dead runs are released on a real Postgres as they are on SQLite: the same tests, another storage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
import pytest
import test_resources_dead_runs as on_sqlite
from postgres_server import DATABASE, PostgresServer, postgres_server

from resources.dead_runs import DeadRuns, release_dead_runs

pytestmark = pytest.mark.cluster
NAMES = {"hostname": "HOST", "port": "PORT", "username": "USER", "password": "PASSWORD", "db_name": "DB"}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as started:
        yield started


@pytest.fixture
def instance(server, tmp_path, monkeypatch) -> Iterator[dg.DagsterInstance]:
    """An instance on an empty database."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.run("dropdb", "--if-exists", "--force", "--maintenance-db=postgres", DATABASE)
    server.run("createdb", "--maintenance-db=postgres", DATABASE)
    database = {key: {"env": f"DAGSTER_PG_{name}"} for key, name in NAMES.items()}
    with dg.instance_for_test(
        temp_dir=str(tmp_path), overrides={"storage": {"postgres": {"postgres_db": database}}}
    ) as opened:
        opened.event_log_storage.set_concurrency_slots(on_sqlite.POOL, 1)
        yield opened


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "holds",
    [
        on_sqlite.test_a_run_whose_process_is_gone_fails_and_frees_its_slot,
        on_sqlite.test_a_run_that_has_not_said_where_it_runs_keeps_its_slot,
        on_sqlite.test_a_finished_run_gives_back_what_it_still_holds,
    ],
    ids=lambda test: test.__name__,
)
def test_a_dead_run(holds, instance):
    holds(instance)


@pytest.mark.parametrize(
    "holds",
    [
        on_sqlite.test_a_running_run_keeps_its_slot,
        on_sqlite.test_a_slot_is_not_free_while_a_step_of_the_dead_run_lives,
    ],
    ids=lambda test: test.__name__,
)
def test_a_run_of_which_a_process_lives(holds, instance, sleeper):
    holds(instance, sleeper)


def test_the_password_is_in_no_file(instance, server, tmp_path):
    on_sqlite.started_run(instance)
    assert server.run("psql", "-Atc", "select count(*) from runs").stdout == "1\n"
    secret = server.variables["DAGSTER_PG_PASSWORD"].encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_a_slot_that_a_later_run_holds_is_not_released(instance):
    dead = on_sqlite.started_run(instance, on_sqlite.dead_pid())
    assert release_dead_runs(instance) == DeadRuns(released=(dead.run_id,))
    later = on_sqlite.started_run(instance)
    assert release_dead_runs(instance) == DeadRuns(unknown=(later.run_id,))
    assert on_sqlite.slots_taken(instance) == 1
