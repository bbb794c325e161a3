"""`draftworks decisions`, `accept`, `hold` and `release`, at a terminal.
`draftworks decide`: what it prints, records and refuses.
The command `draftworks notify`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from acting_fleet import ActingFleet
from decision_site import DecisionSite
from json_server import Reply, Request, json_server
from typer.testing import CliRunner, Result

from draftworks.decision.record import AnswerFile, Choice, find_decision
from draftworks.programs.cli import app


@pytest.fixture
def acting(tmp_path: Path) -> ActingFleet:
    acting = ActingFleet(tmp_path)
    acting.set_budget(10.0)
    acting.add("one", act="none")
    acting.add("two", Choice.UNDECIDED)
    return acting


def run(acting: ActingFleet, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--registry", str(acting.fleet.registry)])


def say(acting: ActingFleet, *words: str) -> str:
    result = run(acting, *words)
    assert result.exit_code == 0, result.output
    return result.output


def test_an_answer_that_no_budget_lets_start_is_told_so(acting: ActingFleet):
    assert "no budget" not in say(acting, "accept", "one", "eagle3", "--choice", "retrain")
    acting.set_budget(None)
    told = say(acting, "accept", "one", "eagle3", "--choice", "retrain")
    assert "warning: deployment.yaml has no budget, so nothing starts by itself" in told
    assert "draftworks run retrain_eagle3 --target one" in told
    assert "no budget" not in say(acting, "accept", "one", "eagle3", "--choice", "keep")


def refuse(acting: ActingFleet, *words: str) -> str:
    result = run(acting, *words)
    assert result.exit_code == 1
    return result.output


def test_decisions_are_listed_with_what_they_wait_for(acting: ActingFleet):
    said = say(acting, "decisions")
    assert "0 of 10 GPU-hours in 7 days" in said
    assert "a retrain waits for a person" in said
    assert "undecided: measure on more prompts" in said
    assert "daemon" not in said


def test_an_accepted_decision_starts_next(acting: ActingFleet):
    assert "retrain of the eagle3 draft of one is accepted by me" in say(
        acting, "accept", "one", "eagle3", "--who", "me", "--why", "slow"
    )
    said = say(acting, "decisions")
    assert "accepted by me" in said
    assert "while Dagster's daemon runs: draftworks ui" in said
    assert "tune" in say(acting, "accept", "two", "eagle3", "--choice", "tune")


def test_an_answer_that_replaces_another_one_says_so(acting: ActingFleet):
    say(acting, "accept", "one", "eagle3", "--choice", "tune", "--who", "you")
    said = say(acting, "accept", "one", "eagle3", "--choice", "keep")
    assert "the answer before it: tune, by you" in said
    assert "nothing starts" in said
    assert "before it" not in say(acting, "accept", "one", "eagle3", "--choice", "keep")


def test_a_hold_is_shown_until_it_is_released(acting: ActingFleet):
    assert "on hold by me" in say(acting, "hold", "one", "--who", "me", "--why", "a test")
    assert "on hold by me" in say(acting, "decisions")
    assert "nothing starts before draftworks release one" in say(acting, "accept", "one", "eagle3")
    assert "is released" in say(acting, "release", "one")
    assert not AnswerFile(acting.var).read().holds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("accept", "one", "dflash"), "does not use 'dflash'; there is: eagle3"),
        (("accept", "on", "eagle3"), "did you mean one"),
        (("accept", "two", "eagle3"), "undecided"),
        (("accept", "one", "eagle3", "--choice", "undecided"), "expected keep, tune or retrain"),
        (("hold", "on"), "did you mean one"),
        (("release", "one"), "not on hold"),
    ],
    ids=range(6),
)
def test_what_makes_no_sense_is_refused_and_nothing_is_recorded(acting: ActingFleet, words: tuple[str, ...], said: str):
    assert said in refuse(acting, *words)
    assert not AnswerFile(acting.var).path.exists()


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    return DecisionSite(tmp_path)


def ask(site: DecisionSite, *arguments: object, strategy: str = "eagle3"):
    return CliRunner().invoke(
        app, ["decide", "small", strategy, "--registry", str(site.registry), *map(str, arguments)]
    )


@pytest.mark.usefixtures("pictures")
def test_it_prints_choice_reasons_margins_and_costs_and_records_them(site: DecisionSite, tmp_path: Path):
    digest = site.publish("a", 2.0)
    site.promote()
    shown = ask(site, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert find_decision(site.artifacts.root, "small", "eagle3") is None
    picture = tmp_path / "loss.png"
    shown = ask(site, "--picture", picture)
    assert f"small, eagle3, draft {digest}: keep the draft in service" in shown.stdout
    assert "heldout: keep: lost +0.000 accepted tokens per pass (+0.000 to +0.000, 120 prompts)" in shown.stdout
    assert "margins: tuned above 0.05, trained from the start above 0.15; at least 120 prompts" in shown.stdout
    assert "cost: a tune not known yet" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = find_decision(site.artifacts.root, "small", "eagle3")
    assert found is not None
    assert (found.draft, found.number) == (digest, 1)


def test_what_cannot_be_decided_is_an_error_and_records_nothing(site: DecisionSite):
    shown = ask(site)
    assert shown.exit_code == 1
    assert "no eagle3 draft in service: run draftworks promote small eagle3" in shown.output
    assert "does not use 'dflash'" in ask(site, strategy="dflash").output
    assert not (site.artifacts.root / "decisions").exists()


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
