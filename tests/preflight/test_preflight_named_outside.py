"""What an entry names and something else has is looked for: variables, programs, pools."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from draftworks.config.deployment import DeploymentSpec
from draftworks.preflight.machine import find_deployment_warnings
from draftworks.programs.cli import app

SERVER = {
    "name": "front",
    "url": "http://127.0.0.1:1",
    "kind": "sglang",
    "strategy": "eagle3",
    "api_key_env": "NOT_SET",
}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"servers": [SERVER]}, "servers.front.api_key_env: the environment has no NOT_SET"),
        (
            {"service": {"hook": {"command": ["/opt/nope"]}}},
            "service.hook.command: no program /opt/nope here (no such file)",
        ),
        ({"service": {"hook": {"command": ["nope-tell"]}}}, "no program nope-tell here (it is not on PATH)"),
        (
            {"service": {"hook": {"url": "http://127.0.0.1:1", "api_key_env": "NOT_SET"}}},
            "service.hook.api_key_env: the environment has no NOT_SET",
        ),
        ({"evaluation": {"draft_tokens": 50}}, "evaluation.draft_tokens: found 50; eagle3 is trained for 2"),
    ],
)
def test_what_is_missing_here_or_doubtful_is_a_warning(fleet, entry: dict, message: str):
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    assert any(message in warning for warning in found.warnings), found


def test_what_is_there_is_no_warning(fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOT_SET", "now it is")
    fleet.write(servers=[SERVER], service={"hook": {"command": [sys.executable]}}, evaluation={"draft_tokens": 4})
    assert not any("NOT_SET" in each or "hook" in each or "draft_tokens" in each for each in fleet.check().warnings)


def test_a_variable_of_a_channel_is_looked_for():
    spec = DeploymentSpec.model_validate({"notifications": [{"kind": "slack", "url_env": "TEAM_URL"}]})
    [found] = find_deployment_warnings(spec, [], environment={})
    assert found.text.startswith("deployment: notifications.0.url_env: the environment has no TEAM_URL")
    assert find_deployment_warnings(spec, [], environment={"TEAM_URL": "https://a.example"}) == []


@pytest.mark.parametrize(("pool", "meant"), [("gpus", "gpu"), ("gpu", None), ("a100", None), (None, None)])
def test_a_pool_that_differs_by_a_letter_is_noticed(pool: str | None, meant: str | None):
    spec = DeploymentSpec.model_validate({"launcher": {"pool": pool}})
    told = [found.text for found in find_deployment_warnings(spec, [], environment={})]
    assert told == (
        [] if meant is None else [f"deployment: launcher.pool: {pool} is another pool than gpu; did you mean gpu?"]
    )


def test_the_command_counts_and_shows_warnings_of_the_deployment(fleet):
    (fleet.registry.root / "deployment.yaml").write_text("launcher: {pool: gpus}\n")
    told = CliRunner().invoke(app, ["check", "--registry", str(fleet.registry.root)])
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert "warning: deployment: launcher.pool: gpus is another pool than gpu; did you mean gpu?" in lines
    assert lines[-1].endswith("no problems, 1 warning")
