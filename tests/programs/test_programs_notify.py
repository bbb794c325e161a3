"""The command `draftworks notify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from json_server import Reply, Request, json_server
from typer.testing import CliRunner

from draftworks.programs.cli import app


def write_registry(root: Path, *channels: dict) -> list[str]:
    (root / "targets").mkdir()
    (root / "deployment.yaml").write_text(yaml.safe_dump({"var": "var", "notifications": list(channels)}))
    return ["notify", "--registry", str(root)]


def test_a_test_message_is_sent_to_the_channels_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Reply:
        seen.append(request)
        return Reply(200 if request.path == "/good" else 500, "")

    with json_server(answer) as url:
        monkeypatch.setenv("TEAM_URL", f"{url}/good")
        command = write_registry(
            tmp_path, {"kind": "slack", "url_env": "TEAM_URL", "name": "team"}, {"kind": "webhook", "url": f"{url}/bad"}
        )
        both = CliRunner().invoke(app, [*command, "--test"])
        one = CliRunner().invoke(app, [*command, "--test", "--channel", "team"])
    assert (both.exit_code, one.exit_code) == (1, 0)
    assert "team: the test message has arrived" in one.output
    assert "it answers 500: Internal Server Error, and nothing else was said" in both.output
    assert [request.path for request in seen] == ["/good", "/bad", "/good"]
    assert seen[0].body == {"text": "test: a test message of draftworks notify --test"}


def test_channels_are_shown_with_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_URL", "https://here")
    command = write_registry(tmp_path, {"kind": "slack", "url_env": "TEAM_URL", "name": "team", "events": ["failure"]})
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    assert shown.output == "team: failure; 0 events waiting\n"
    monkeypatch.delenv("TEAM_URL")
    assert CliRunner().invoke(app, command).output == (
        "team: failure; 0 events waiting; not set in this environment: TEAM_URL\n"
    )


@pytest.mark.parametrize("arguments", [["--channel", "nobody"], ["--test", "--channel", "nobody"]])
def test_a_channel_that_does_not_exist_is_named(arguments: list[str], tmp_path: Path) -> None:
    command = write_registry(tmp_path, {"kind": "slack", "url_env": "TEAM_URL", "name": "team"})
    done = CliRunner().invoke(app, [*command, *arguments])
    assert done.exit_code == 1
    assert "no channel nobody; there is: team" in done.output


def test_a_missing_address_is_named_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEAM_URL", raising=False)
    command = write_registry(tmp_path, {"kind": "slack", "url_env": "TEAM_URL", "name": "team"})
    done = CliRunner().invoke(app, [*command, "--test"])
    assert done.exit_code == 1
    assert "TEAM_URL" in done.output
