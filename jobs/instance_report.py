"""What state Dagster's instance and the code location are in, for `draftworks doctor`.

    python -m jobs.instance_report REGISTRY    prints a JSON object per line, see `draftworks.preflight.installation.machine_probes`

Nothing is written: an instance without a database is not opened, since opening would create one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.preflight.installation.machine_probes import Line
from draftworks.storage.words import format_count, list_names
from draftworks.targets.registry import Registry
from jobs.instance_problems import describe_instance_problem
from resources.dagster_internals import InstanceRef
from resources.dead_runs import find_run_process
from resources.job_claims import CLAIM, JobClaim

AREA = "dagster"
SILENT_DAEMON_S = 300.0
"""A daemon says every 30 s that it lives."""
DATABASES = ("history/runs.db", "history/runs/index.db", "schedules/schedules.db")
CONFIG = "dagster.yaml"
STORAGES = ("storage", "run_storage", "event_log_storage", "schedule_storage")
UNFINISHED = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.CANCELING]
CONNECT_S = 4
_MOST_RUNS = 200


def report_instance(home: Path, registry: Registry) -> Iterator[Line]:
    """Yield lines about the instance in a DAGSTER_HOME, then about the code location."""
    instance = None
    try:
        reason = find_reason_not_to_open(home)
        if reason is None:
            instance = open_instance(home)
            runs = instance.get_runs_count()
            yield Line(AREA, "ok", f"instance {home}: its storage answers, {format_count(runs, 'run')}")
            yield from report_migrations(instance)
            yield from report_daemon(instance, acts=acts_by_itself(registry))
            yield from report_dead_runs(instance)
        else:
            yield Line(AREA, "ok", reason)
            if acts_by_itself(registry):
                yield _describe_missing_daemon("no daemon has ever run", acts=True)
    except Exception as error:
        found = describe_instance_problem(error) or f"{home}: the instance cannot be opened: {_describe(error)}"
        yield Line(AREA, "problem", found, "see docs/how-to/deployment.md")
        instance = None
    yield from report_claims(registry)
    yield from report_code_location(registry, instance)


def find_reason_not_to_open(home: Path) -> str | None:
    """Return why an instance is not opened; None if its databases are there, or are not in files."""
    if not home.is_dir():
        return f"instance {home}: does not exist yet; the first run makes it"
    if _read_storage(home):
        return None
    missing = [name for name in DATABASES if not (home / name).is_file()]
    return f"instance {home}: has no database yet; the first run makes it" if missing else None


def open_instance(home: Path) -> dg.DagsterInstance:
    """Open the instance, without creating the tables that a new Postgres database lacks."""
    storage, overrides = _read_storage(home).get("storage"), dict[str, Any]()
    if isinstance(storage, dict) and isinstance(storage.get("postgres"), dict):
        postgres = {**storage["postgres"], "should_autocreate_tables": False}
        overrides["storage"] = {**storage, "postgres": postgres}
        require_postgres(storage["postgres"])
    return dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home), overrides=overrides))


def require_postgres(settings: dict[str, Any]) -> None:
    """Connect to the database once, in a bounded time; Dagster itself tries again for longer than a doctor may take.

    Raises:
        OperationalError: it does not answer, or refuses this user.
    """
    import sqlalchemy
    from dagster_postgres.utils import pg_url_from_config

    values = _resolve_variables(settings)
    if values is None:
        return  # Dagster says which variable is not set
    engine = sqlalchemy.create_engine(pg_url_from_config(values), connect_args={"connect_timeout": CONNECT_S})
    with engine.connect():
        pass
    engine.dispose()


def report_migrations(instance: dg.DagsterInstance) -> Iterator[Line]:
    """Yield whether the databases have the schema of this version of Dagster."""
    behind = []
    storages = {
        "runs": instance.run_storage,
        "events": instance.event_log_storage,
        "schedules": instance.schedule_storage,
    }
    for name, storage in storages.items():
        version = None if storage is None else storage.alembic_version()
        if version is not None and version[0] != version[1]:
            behind.append(f"{name} ({version[0]}, this version's is {version[1]})")
    if behind:
        todo = "end all runs and the daemon, make a backup, then: dagster instance migrate (docs/operations.md)"
        yield Line(AREA, "problem", f"the database is of another version of Dagster: {', '.join(behind)}", todo)
    else:
        yield Line(AREA, "ok", f"no migration is needed for Dagster {dg.__version__}")


def report_daemon(instance: dg.DagsterInstance, acts: bool) -> Iterator[Line]:
    """Yield whether the daemon lives, by its heartbeats.

    Args:
        acts: whether the deployment wants something to start by itself.
    """
    heartbeats = instance.get_daemon_heartbeats()
    required = set(instance.get_required_daemon_types())
    known = {kind: time.time() - beat.timestamp for kind, beat in heartbeats.items() if kind in required}
    silent = {kind: age for kind, age in known.items() if age > SILENT_DAEMON_S}
    if not known:
        yield _describe_missing_daemon("no daemon has ever run", acts)
    elif silent:
        oldest = max(silent.values())
        yield _describe_missing_daemon(f"the daemon is silent: {', '.join(sorted(silent))} for {_format(oldest)}", acts)
    else:
        yield Line(AREA, "ok", f"the daemon lives, {', '.join(sorted(known))}")
    for kind, beat in heartbeats.items():
        if kind in known and kind not in silent and beat.errors:
            first = beat.errors[0].message.strip().splitlines()[0]
            yield Line(AREA, "warning", f"the daemon's {kind} reports an error: {first}", "look at the daemon's log")


def report_dead_runs(instance: dg.DagsterInstance) -> Iterator[Line]:
    """Yield unfinished runs of this machine whose process is gone."""
    dead = []
    for run in instance.get_runs(filters=dg.RunsFilter(statuses=UNFINISHED), limit=_MOST_RUNS):
        process = find_run_process(run)
        if process is not None and process.is_dead():
            dead.append(run.run_id)
    if dead:
        todo = "the next run, or pool_slot_sensor, marks them as failed and frees their pool slots"
        yield Line(AREA, "warning", f"runs whose process is gone: {list_names(dead)}", todo)


def report_claims(registry: Registry) -> Iterator[Line]:
    """Yield claims of scheduler jobs for which no living run of this machine waits."""
    try:
        var = registry.resolve_var_folder()
    except DraftworksError:
        return
    paths = [*var.glob(f"*/*/*/{CLAIM}"), *var.glob(f"*/*/*.{CLAIM}")]
    claims = {path: JobClaim.read(path) for path in paths}
    stale = [path for path, claim in claims.items() if claim is not None and claim.owner.is_dead()]
    if stale:
        todo = "run the same job again: it waits for the scheduler's job; orphan_sensor ends those nobody waits for"
        names = list_names(path.relative_to(var) for path in sorted(stale))
        yield Line("leftovers", "warning", f"claims of jobs whose run is gone: {names}", todo)


def report_code_location(registry: Registry, instance: dg.DagsterInstance | None) -> Iterator[Line]:
    """Yield whether the definitions of this registry load, and what a person has switched off."""
    from spec_assets.code_location import build_definitions

    try:
        definitions = build_definitions(registry.root)
        repository = definitions.get_repository_def()
    except Exception as error:
        yield Line(AREA, "problem", f"the code location does not load: {_describe(error)}", "draftworks check")
        return
    defaults = {one.name: one.default_status.value for one in (*repository.schedule_defs, *repository.sensor_defs)}
    on = sorted(name for name, status in defaults.items() if status == "RUNNING")
    count = len(list(repository.assets_defs_by_key))
    yield Line(AREA, "ok", f"the code location loads: {count} assets, on by default: {', '.join(on) or 'nothing'}")
    states = () if instance is None else instance.all_instigator_state()
    stopped = {state.instigator_name for state in states if state.status.value == "STOPPED"}
    switched_off = [name for name in on if name in stopped]
    if switched_off:
        todo = "switch them on in the UI under Automation, unless this is wanted"
        yield Line(AREA, "warning", f"on by the deployment, but switched off: {', '.join(switched_off)}", todo)


def acts_by_itself(registry: Registry) -> bool:
    """Whether the deployment asks for runs that start by themselves; False where it cannot be read."""
    try:
        return registry.load_deployment().automation
    except DraftworksError:
        return False


def _describe_missing_daemon(found: str, acts: bool) -> Line:
    if acts:
        todo = "start it: make ui, or dagster-daemon run; nothing starts by itself without it (automation: true)"
        return Line(AREA, "problem", found, todo)
    return Line(AREA, "ok", f"{found}; runs from a terminal need none, schedules and sensors do")


def _read_storage(home: Path) -> dict[str, Any]:
    """Return the storage that dagster.yaml configures; empty for SQLite in DAGSTER_HOME."""
    import yaml

    path = home / CONFIG
    values = (yaml.safe_load(path.read_text()) if path.is_file() else None) or {}
    return {name: values[name] for name in STORAGES if name in values} if isinstance(values, dict) else {}


def _resolve_variables(values: Any) -> Any:
    """Return settings with `{env: NAME}` replaced by the variable's value; None if one is not set."""
    if not isinstance(values, dict):
        return values
    if set(values) == {"env"}:
        return os.environ.get(str(values["env"]))
    found = {name: _resolve_variables(value) for name, value in values.items()}
    return None if None in found.values() else found


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _format(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def main() -> None:
    registry = Registry(Path(sys.argv[1]))
    for line in report_instance(Path(os.environ["DAGSTER_HOME"]), registry):
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main()
