"""`draftworks promote`, `rollback` and `in-service`, as a user and a server's start script call them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from exchanging_vllm import ExchangingVLLM, SwapSite
from service_site import ServiceSite
from typer.testing import CliRunner

from draftworks.programs.cli import app


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    return ServiceSite(tmp_path)


def call(site: ServiceSite, *words: str) -> Result:
    return CliRunner().invoke(app, [words[0], "small", "eagle3", *words[1:], "--registry", str(site.registry)])


def test_a_draft_goes_into_service_and_back(site: ServiceSite):
    assert "draftworks promote small eagle3" in call(site, "in-service").stderr
    first = site.publish("a", 1.0)
    assert f"draft {first}: accepted; nothing is changed" in call(site, "promote", "--dry-run").stdout
    assert call(site, "promote", "--who", "ann", "--why", "the first").exit_code == 0
    second = site.publish("b", 1.5)
    assert call(site, "promote").exit_code == 0
    shown = call(site, "in-service", "--history").stdout
    assert f"1. promote: draft {first}" in shown
    assert f"draft {second}: promoted" in shown
    assert "by ann" in shown
    assert "+0.500" in shown
    assert Path(call(site, "in-service", "--folder").stdout.strip()).joinpath("model.safetensors").exists()
    assert call(site, "rollback", "--why", "slower").exit_code == 0
    assert f"rollback: draft {first}" in call(site, "in-service").stdout


def test_a_refusal_ends_with_its_figures_and_exit_code_1(site: ServiceSite):
    site.publish("a", 1.0)
    call(site, "promote")
    site.publish("b", 0.5)
    refused = call(site, "promote")
    assert refused.exit_code == 1
    assert "worse: -0.500" in refused.stderr
    assert call(site, "promote", "--force").exit_code == 1
    assert "the rule was overruled: for a test" in call(site, "promote", "--force", "--why", "for a test").stdout


def test_a_canary_is_shown_with_its_share(site: ServiceSite):
    site.publish("a", 1.0)
    call(site, "promote")
    second = site.publish("b", 1.0)
    assert f"canary {second} gets 25% of the requests" in call(site, "promote", "--canary", "0.25").stdout


@pytest.mark.parametrize(("code", "exit_code"), [("raise SystemExit(1)", 1), ("pass", 0)])
def test_the_hook_decides_the_exit_code_and_not_what_is_in_service(tmp_path: Path, code: str, exit_code: int):
    hook = {"command": [sys.executable, "-c", code], "attempts": 1}
    site = ServiceSite(tmp_path, entry={"service": {"hook": hook}})
    site.publish("a", 1.0)
    assert call(site, "promote").exit_code == exit_code
    assert site.open().register.require().number == 1
    entry = yaml.safe_load((site.registry / "targets" / "small.yaml").read_text())
    digest = site.open().register.require().draft.digest
    entry["service"]["hook"]["command"] = ["echo", f'{{"confirmed": "{digest}"}}']
    (site.registry / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))
    again = call(site, "promote")
    assert again.exit_code == 0
    assert ("has confirmed" in again.stdout) == bool(exit_code)  # one that has succeeded is not called again


def test_promoting_what_is_in_service_says_that_nothing_is_changed(tmp_path: Path):
    site = ServiceSite(tmp_path)
    draft = site.publish_draft("a")
    site.publish_report(draft, {"heldout": 2.0})
    site.publish_export(draft)
    assert "nothing is changed" not in call(site, "promote").stdout
    again = call(site, "promote")
    assert again.exit_code == 0
    assert "nothing is changed, as this draft is in service already: promote: draft" in again.stdout


def test_the_drafts_of_a_strategy_that_an_entry_dropped_stay_and_go_back_as_before(site: ServiceSite):
    pinned, loose = site.publish("e", 0.1), site.publish("f", 0.1)
    drafts = [site.publish(name, accepted) for name, accepted in (("a", 1.0), ("b", 1.2), ("c", 1.4), ("d", 1.6))]
    for draft, more in zip(drafts, [[], [], [], ["--canary", "0.5"]], strict=True):
        assert call(site, "promote", "--draft", draft, *more).exit_code == 0
    on_registry = ("--registry", str(site.registry))
    pin = ("pin", "small", "eagle3_draft", "--digest", pinned[:8], "--why", "for a paper")
    assert CliRunner().invoke(app, [*pin, *on_registry]).exit_code == 0

    path = site.registry / "targets" / "small.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "strategies": {"dflash": {}}}))
    (site.registry / "deployment.yaml").write_text("var: ../var\nretention: {keep_days: 0}\n")
    shown = call(site, "in-service", "--history").stdout
    assert f"canary {drafts[3]} gets 50%" in shown
    assert "pinned" in CliRunner().invoke(app, ["usage", *on_registry]).stdout
    assert CliRunner().invoke(app, ["prune", "--yes", *on_registry]).exit_code == 0
    for draft in (*drafts, pinned):
        assert (site.root / "var" / "eagle3_draft" / "small" / draft).is_dir(), draft
    assert not (site.root / "var" / "eagle3_draft" / "small" / loose).exists()
    assert len(list((site.root / "var" / "eagle3_report" / "small").glob("*/"))) >= len(drafts)
    assert call(site, "rollback", "--why", "the canary is slow").exit_code == 0
    assert call(site, "rollback", "--why", "so is the draft").exit_code == 0
    assert f"rollback: draft {drafts[1]}" in call(site, "in-service").stdout
    assert Path(call(site, "in-service", "--folder").stdout.strip()).joinpath("model.safetensors").exists()
    assert "does not use this strategy; there is: dflash" in call(site, "promote", "--draft", drafts[3]).stderr


def test_a_draft_that_a_running_server_accepts_less_of_is_taken_back_and_the_command_fails(tmp_path: Path):
    with ExchangingVLLM.make(tmp_path / "served").run() as server:
        server.by_reading = True
        site = SwapSite(tmp_path, entry={"service": {"swap": server.describe(every_s=0.05)}})
        first, second = site.publish("a", 1.0), site.publish("b", 1.5)
        server.accepts = {"default": 1.0, first: 1.0, second: 0.5}
        assert call(site, "promote", "--draft", first).exit_code == 0
        told = call(site, "promote", "--who", "ann")
        assert told.exit_code == 1
        assert f"{server.url} went back from draft {second} to {first}: it accepted clearly less" in told.stdout
        assert f"rollback: draft {first} is in service" in told.stdout
        assert server.version == first
        shown = call(site, "in-service").stdout
        assert "by ann" in shown
        assert f"{server.url} serves draft {first}: the server went back to it from draft {second}" in shown
        server.accepts = {first: 1.0, second: 1.2}
        again = call(site, "promote")  # a person who asks again gets it
        assert again.exit_code == 0
        assert f"{server.url} serves draft {second}: it accepts no less" in again.stdout
