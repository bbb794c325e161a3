"""From the command line and over GraphQL, as CI and the UI use it: exit codes and messages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from coverings import gate_or_long

DAGSTER = Path(sys.executable).with_name("dagster")
ROOT = Path(__file__).resolve().parents[2]


def execute(site, job: str, partition: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a job with the command line."""
    home = site.root / "dagster_home"
    home.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", home)
    command = [str(DAGSTER), "job", "execute", "-f", str(site.module()), "-j", job]
    command += ["--tags", f'{{"dagster/partition": "{partition}"}}', "-c", str(ROOT / "jobs" / "console.yaml")]
    environment = {**os.environ, "DAGSTER_HOME": str(home), **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_an_unknown_partition_fails_with_its_name(site):
    finished = execute(site, "resolve", "smal")
    assert finished.returncode != 0
    assert "smal.yaml: no such file; did you mean small?" in finished.stderr


def test_a_failing_step_gives_its_message_and_a_non_zero_exit_code(site):
    site.target_file.write_text(site.target_file.read_text().replace("max_length", "max_lenght"))
    finished = execute(site, "resolve", "small")
    assert finished.returncode == 1
    assert "unknown key max_lenght; did you mean max_length?" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    gate_or_long(
        [(["check", "defs"], 0), (["launch", "--job", "resolve", "--partition", "smal"], 1)], lambda case: case[1] == 1
    ),
)
def test_dg_finds_the_project_and_refuses_an_unknown_partition(arguments, code, tmp_path):
    command = [str(DAGSTER.with_name("dg")), *arguments]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == code
    assert code == 0 or "Could not find a partition with key `smal`" in finished.stdout + finished.stderr


def test_draftworks_check_lists_every_problem(site):
    command = [sys.executable, "-m", "draftworks.programs.cli", "check", "--registry", str(site.registry)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    site.chats.rename(site.chats.with_name("moved"))
    for name in ("one", "two"):
        (site.registry / "targets" / f"{name}.yaml").write_text("model: m\n")
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1
    assert "small: data set chats: 'chats.jsonl' matches no file" in found.stdout
    assert "one.yaml: key dataset is missing" in found.stdout
    assert "two.yaml: key dataset is missing" in found.stdout


def test_draftworks_keys_names_every_key_that_a_target_may_have():
    from draftworks.programs.keys import list_keys
    from draftworks.targets.registry import Registry

    known = {key.name for key in list_keys("target")}
    known |= {key.name for key in list_keys("deployment") if key.name.startswith("launcher.")}  # merged into those
    given = Registry(ROOT / "registry").load_target("tiny").model_dump()
    flat = set(_flat({name: value for name, value in given.items() if name != "name"}))
    assert flat <= known
    assert [key.name for key in list_keys("target") if not key.meaning] == []


def _flat(values: dict, prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        names += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return names


def test_draftworks_summary_of_a_target_without_results_says_so(site):
    command = [sys.executable, "-m", "draftworks.programs.cli", "summary", "small", "--registry", str(site.registry)]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "nothing made yet" in shown.stdout


def test_draftworks_summary_shows_results_and_acceptance(finished_site):
    command = [
        sys.executable,
        "-m",
        "draftworks.programs.cli",
        "summary",
        "small",
        "--registry",
        str(finished_site.registry),
    ]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0
    for word in ("training_features", "trained", "untrained", "bigram", "simulated", "walk", "loop"):
        assert word in shown.stdout
    command[4] = "smal"
    unknown = subprocess.run(command, capture_output=True, text=True)
    assert unknown.returncode == 1
    assert "did you mean small" in unknown.stderr


PARTITIONS = (
    '{ assetNodeOrError(assetKey: {path: ["eagle3_draft"]}) { ... on AssetNode { partitionKeys groupName kinds } } }'
)
NODES = "{ assetNodes { assetKey { path } hasAssetChecks } }"


def test_the_ui_sees_every_asset_and_its_partitions(site):
    pytest.importorskip("httpx")
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import PythonFileTarget
    from dagster_webserver.webserver import DagsterWebserver
    from starlette.testclient import TestClient

    target = PythonFileTarget(
        str(site.module()), attribute=None, working_directory=str(ROOT), location_name="draftworks"
    )
    with (
        dg.instance_for_test() as instance,
        WorkspaceProcessContext(instance, target) as workspace,
        TestClient(DagsterWebserver(workspace).create_asgi_app()) as client,
    ):
        draft = client.post("/graphql", json={"query": PARTITIONS}).json()["data"]["assetNodeOrError"]
        nodes = client.post("/graphql", json={"query": NODES}).json()["data"]["assetNodes"]
    assert draft == {"partitionKeys": ["small"], "groupName": "drafts", "kinds": draft["kinds"]}
    assert set(draft["kinds"]) == {"pytorch", "safetensors"}
    checked = {node["assetKey"]["path"][-1] for node in nodes if node["hasAssetChecks"]}
    assert {"eagle3_draft", "tokenized_train", "training_features"} <= checked
