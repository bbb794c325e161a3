"""What is wrong with an instance is found on a real one: a dead daemon, an old database, a database that is away."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.instance.ref import InstanceRef
from dagster._daemon.types import DaemonHeartbeat
from dagster_state import forget_instance

from draftworks.preflight.findings import Finding
from draftworks.targets.registry import Registry
from jobs import instance_report
from jobs.instance_report import SILENT_DAEMON_S, report_claims, report_code_location, report_instance

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    root = tmp_path / "registry"
    for folder in ("targets", "datasets"):
        (root / folder).mkdir(parents=True)
    (root / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    return Registry(root)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """DAGSTER_HOME. The code location has tests of its own here, since it takes seconds to load."""
    monkeypatch.setattr(instance_report, "report_code_location", lambda registry, instance: iter(()))
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    forget_instance()


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home))) as made:
        yield made


def act_by_itself(registry: Registry) -> None:
    (registry.root / "deployment.yaml").write_text("automation: true\n")


def beat(instance: dg.DagsterInstance, age_s: float) -> None:
    for kind in instance.get_required_daemon_types():
        instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - age_s, kind, "daemon", []))


def find(lines: Iterator[Finding], words: str) -> Finding:
    found = [line for line in lines if words in line.text]
    assert len(found) == 1, words
    return found[0]


def list_tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.parametrize("exists", [True, False])
def test_an_instance_that_was_never_used_is_not_made(home: Path, registry: Registry, exists: bool):
    if not exists:
        home.rmdir()
    before = list_tree(home.parent)
    found = list(report_instance(home, registry))
    assert {line.severity for line in found} == {"ok"}
    assert list_tree(home.parent) == before


def test_a_look_at_an_instance_changes_nothing(home: Path, registry: Registry, instance: dg.DagsterInstance):
    beat(instance, 10)
    before = {name: text for name, text in list_tree(home).items() if not name.endswith(("-wal", "-shm"))}
    found = list(report_instance(home, registry))
    assert {line.severity for line in found} == {"ok"}
    assert find(iter(found), "no migration is needed")
    assert find(iter(found), "the daemon lives")
    assert {name: text for name, text in list_tree(home).items() if not name.endswith(("-wal", "-shm"))} == before


@pytest.mark.parametrize("age_s", [None, SILENT_DAEMON_S + 3600])
def test_a_dead_daemon_is_a_problem_where_something_is_to_start_by_itself(
    home: Path, registry: Registry, instance: dg.DagsterInstance, age_s: float | None
):
    if age_s is not None:
        beat(instance, age_s)
    words = "no daemon has ever run" if age_s is None else "the daemon is silent"
    assert find(report_instance(home, registry), words).severity == "ok"
    act_by_itself(registry)
    line = find(report_instance(home, registry), words)
    assert (line.severity, "start it" in line.remedy) == ("error", True)


def test_a_database_of_another_version_is_a_problem(home: Path, registry: Registry, instance: dg.DagsterInstance):
    with sqlite3.connect(home / "history" / "runs.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '16e3655b4d9b'")
    line = find(report_instance(home, registry), "another version of Dagster")
    assert (line.severity, "dagster instance migrate" in line.remedy) == ("error", True)


def test_a_database_that_does_not_answer_is_a_problem_without_its_password(
    home: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    (home / "dagster.yaml").symlink_to(DEPLOY / "dagster.yaml")
    [line] = [line for line in report_instance(home, registry) if line.severity == "error"]
    assert "environment variable" in line.text
    values = {"HOST": "127.0.0.1", "PORT": "1", "USER": "me", "PASSWORD": "hunter22", "DB": "d"}
    for name, value in values.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", value)
    monkeypatch.setenv("DRAFTWORKS_COMPUTE_LOGS", str(home / "logs"))
    [line] = [line for line in report_instance(home, registry) if line.severity == "error"]
    assert str(home / "dagster.yaml") in line.text
    assert "hunter22" not in line.text


def test_a_claim_whose_run_is_gone_is_a_warning(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    claim = registry.resolve_var_folder() / "x_draft" / "a" / "0123456789abcdef.partial" / "job.json"
    claim.parent.mkdir(parents=True)
    claim.write_text("no claim")
    assert list(report_claims(registry)) == []

    class Claim:
        class owner:
            is_dead = staticmethod(lambda: True)

    monkeypatch.setattr(instance_report.JobClaim, "read", lambda path: Claim())
    [line] = report_claims(registry)
    assert (line.severity, str(claim.relative_to(registry.resolve_var_folder())) in line.text) == ("warning", True)


def test_the_code_location_loads_and_what_is_switched_off_is_told(tmp_path: Path, registry: Registry):
    from dagster._core.remote_origin import (
        InProcessCodeLocationOrigin,
        RemoteInstigatorOrigin,
        RemoteRepositoryOrigin,
    )
    from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        [line] = report_code_location(registry, instance)
        assert (line.severity, "pool_slot_sensor" in line.text) == ("ok", True)
        place = InProcessCodeLocationOrigin(LoadableTargetOrigin(python_file="x.py"))
        origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(place, "r"), "pool_slot_sensor")
        off = InstigatorState(origin, dg._core.definitions.run_request.InstigatorType.SENSOR, InstigatorStatus.STOPPED)
        instance.add_instigator_state(off)
        found = list(report_code_location(registry, instance))
        assert [one.severity for one in found] == ["ok", "warning"]
        assert "pool_slot_sensor" in found[1].text
    forget_instance()


def test_a_code_location_that_does_not_load_is_a_problem(tmp_path: Path):
    [line] = report_code_location(Registry(tmp_path / "none"), None)
    assert (line.severity, "does not load" in line.text) == ("error", True)
