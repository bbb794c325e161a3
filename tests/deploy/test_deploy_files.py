"""What `deploy/` says is true: its commands, paths, ports, variables and Dagster's settings exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._cli import create_dagster_cli
from dagster._core.instance.config import dagster_instance_config
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster._daemon.cli import create_dagster_daemon_cli
from dagster_webserver.cli import dagster_webserver
from deploy_toys import CHECKOUT, DEPLOY, UNITS, read_environment, read_unit

from draftworks.programs.start import LOOPBACK

SECRETS = re.compile(r"password|secret|token|api_key", re.IGNORECASE)
VARIABLE = re.compile(r"\$\{(\w+)[^}]*\}")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
HELM = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IN_IMAGE = "/opt/draftworks"
CODE = CHECKOUT / "spec_assets" / "definitions.py"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The example's variables, set."""
    values = {**read_environment(), "DAGSTER_PG_PASSWORD": "secret", "DRAFTWORKS_COMPUTE_LOGS": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def parse_command(words: list[str]) -> dict[str, object]:
    """Return the parameters that a command of Dagster's gets, as its own command line parses them; nothing is run."""
    clis = {"dagster": create_dagster_cli, "dagster-daemon": create_dagster_daemon_cli}
    name, *rest = words
    command = dagster_webserver if Path(name).name == "dagster-webserver" else clis[Path(name).name]()
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(name, rest).params


def list_commands() -> dict[str, list[str]]:
    """Every command of Dagster's in `deploy/`, by where it stands."""
    found = {unit: read_unit(unit).command for unit in UNITS}
    for name, service in COMPOSE["services"].items():
        if "command" in service:
            found[f"compose {name}"] = service["command"]
        if service.get("healthcheck", {}).get("test", [""])[0] == "CMD":
            found[f"compose {name} healthcheck"] = service["healthcheck"]["test"][1:]
    (code,) = HELM["dagster-user-deployments"]["deployments"]
    started = ["dagster", "code-server", "start", "-h", "0.0.0.0", "-p", str(code["port"])]
    return {**found, "helm": [*started, *code["codeServerArgs"]]}


@pytest.mark.parametrize("where", list_commands())
def test_a_command_is_one_of_dagsters_with_options_that_it_has(where, environment, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    words = [VARIABLE.sub(lambda match: environment[match[1]], word) for word in list_commands()[where]]
    parameters = parse_command([word.replace(IN_IMAGE, str(CHECKOUT)) for word in words])
    if "location_name" in parameters:
        assert (parameters["location_name"], parameters["working_directory"]) == ("draftworks", str(CHECKOUT))
        assert Path(str(parameters["python_file"])).resolve() == CODE
    if "workspace" in parameters:
        assert [Path(path).resolve() for path in parameters["workspace"]] == [DEPLOY / "workspace.yaml"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_runs_the_checkouts_programs_with_declared_variables_only(unit, environment):
    read = read_unit(unit)
    assert read.command[0].startswith(f"{IN_IMAGE}/.venv/bin/")
    assert set(VARIABLE.findall(" ".join(read.command))) <= environment.keys()
    assert read.settings["WorkingDirectory"] == IN_IMAGE
    assert read.settings["EnvironmentFile"] == "/etc/draftworks/draftworks.env"
    assert read.settings["User"] == read.settings["Group"] == "draftworks"
    others = {name for line in read.after for name in line.split() if name.startswith("draftworks")}
    assert others <= set(UNITS)


def test_units_listen_on_loopback_and_compose_publishes_there_only(environment):
    hosts = []
    for unit in UNITS:
        words = [VARIABLE.sub(lambda match: environment[match[1]], word) for word in read_unit(unit).command]
        hosts += [words[words.index("-h") + 1]] if "-h" in words else []
    assert hosts == [LOOPBACK] * 2
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert published == {"webserver": [f"{LOOPBACK}:${{DRAFTWORKS_UI_PORT:-3000}}:3000"]}
    assert HELM["dagsterWebserver"]["service"]["type"] == "ClusterIP"


def test_the_instance_is_the_checkouts_but_for_where_it_stores(environment, tmp_path):
    (tmp_path / "dagster.yaml").write_text((DEPLOY / "dagster.yaml").read_text())
    config, _ = dagster_instance_config(str(tmp_path))
    checkouts = yaml.safe_load((CHECKOUT / ".dagster" / "dagster.yaml").read_text())
    assert {name: config[name] for name in config if name not in ("storage", "compute_logs")} == checkouts
    assert config["storage"]["postgres"]["postgres_db"] == {
        key: {"env": f"DAGSTER_PG_{name}"}
        for key, name in {
            "hostname": "HOST", "port": "PORT", "username": "USER", "password": "PASSWORD", "db_name": "DB",
        }.items()
    }  # fmt: skip


def test_dagster_makes_postgres_storages_of_it(environment, tmp_path):
    (tmp_path / "dagster.yaml").write_text((DEPLOY / "dagster.yaml").read_text())
    ref = dg._core.instance.InstanceRef.from_dir(str(tmp_path))
    storage = ref.storage_data
    assert (storage.module_name, storage.class_name) == ("dagster_postgres", "DagsterPostgresStorage")
    assert "secret" not in storage.config_yaml
    assert ref.compute_logs_data.rehydrate(as_type=object)._base_dir == environment["DRAFTWORKS_COMPUTE_LOGS"]


def test_the_workspace_names_the_server_that_units_and_compose_start(environment):
    (origin,) = WorkspaceFileTarget([str(DEPLOY / "workspace.yaml")]).create_origins()
    assert (origin.host, origin.port) == (environment["DRAFTWORKS_CODE_HOST"], int(environment["DRAFTWORKS_CODE_PORT"]))
    inside = COMPOSE["x-draftworks"]["environment"]
    code = parse_command(COMPOSE["services"]["code"]["command"])
    assert inside["DRAFTWORKS_CODE_HOST"] in COMPOSE["services"]
    assert int(inside["DRAFTWORKS_CODE_PORT"]) == code["port"]


def test_compose_declares_what_it_uses(environment):
    services, text = COMPOSE["services"], (DEPLOY / "compose.yaml").read_text()
    assert set(VARIABLE.findall(text)) <= environment.keys()
    needed = set(
        re.findall(r"env: (\w+)", (DEPLOY / "dagster.yaml").read_text() + (DEPLOY / "workspace.yaml").read_text())
    )
    assert needed <= COMPOSE["x-draftworks"]["environment"].keys()
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= services.keys(), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            known = source in COMPOSE["volumes"] or source in ("../registry", "../var")
            assert known, f"{name}: {volume}"
    build = services["code"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_image_copies_and_installs_what_there_is():
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"-e '\.\[(.*)\]'", DOCKERFILE)
    assert set(named.split(",")) <= extras.keys()
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in shlex.split(line)[:-1]]
    assert set(copied) == kept
    assert not [name for name in copied if not (CHECKOUT / name).exists()]
    image = COMPOSE["x-draftworks"]["environment"]
    assert f"mkdir -p {image['DAGSTER_HOME']} {image['DRAFTWORKS_COMPUTE_LOGS']}" in DOCKERFILE


def test_the_charts_values_say_the_same_as_the_instance():
    instance = yaml.safe_load((DEPLOY / "dagster.yaml").read_text())
    pools, monitoring = HELM["concurrency"]["pools"], HELM["dagsterDaemon"]["runMonitoring"]
    assert {"granularity": pools["granularity"], "default_limit": pools["defaultLimit"]} == instance["concurrency"][
        "pools"
    ]
    assert instance["run_monitoring"]["enabled"] is monitoring["enabled"] is True
    assert HELM["telemetry"] == instance["telemetry"]
    (code,) = HELM["dagster-user-deployments"]["deployments"]
    volumes = {volume["name"] for volume in code["volumes"]}
    assert {mount["name"] for mount in code["volumeMounts"]} == volumes
    assert {mount["mountPath"] for mount in code["volumeMounts"]} == {f"{IN_IMAGE}/registry", f"{IN_IMAGE}/var"}


def test_the_daemon_frees_no_slots_that_jobs_of_ended_runs_use():
    for path in (DEPLOY / "dagster.yaml", CHECKOUT / ".dagster" / "dagster.yaml"):
        monitoring = yaml.safe_load(path.read_text())["run_monitoring"]
        assert not monitoring.get("free_slots_after_run_end_seconds"), path
    assert HELM["dagsterDaemon"]["runMonitoring"]["freeSlotsAfterRunEndSeconds"] == 0, "the chart's way to turn it off"


def test_no_file_has_a_secret_in_it():
    """Every secret is a reference to a variable, or the name of a secret that is kept elsewhere."""
    for path in [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".service"]:
        for line in path.read_text().splitlines():
            name, _, value = line.strip().partition("=" if path.suffix == ".example" else ":")
            if SECRETS.search(name) and not line.strip().startswith("#"):
                assert re.fullmatch(r"\s*|\s*\$\{.*|\s*\{env: .*|\s*false|\s*draftworks-postgres", value), (
                    f"{path}: {line}"
                )
