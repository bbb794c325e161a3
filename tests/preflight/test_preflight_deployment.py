"""Each mistake in deployment.yaml is one line of `draftworks check`, also as JSON, and the targets are examined all the same.
What an entry names and something else has is looked for: variables, programs, pools.
Findings are cached while entry, files, data and versions are unchanged, and only if there was no error.
Findings: each mistake is one line, whether it was looked for or raised.
The probe of an engine has to reach a layer that drafts read.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftworks.config.operations import DeploymentSpec
from draftworks.errors import ConfigError, DataError
from draftworks.preflight import drafts, sample
from draftworks.preflight import examine as examination
from draftworks.preflight.examine import examine_before_run
from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import find_deployment_warnings
from draftworks.programs.cli import app
from draftworks.programs.start import shorten_paths
from draftworks.targets.safetensors_headers import read_header

MISTAKES = {
    "kind of launcher": ("launcher: {kind: slrum}", ["launcher"]),
    "settings that are missing": ("launcher: {kind: kubernetes}", ["launcher: key image is missing"]),
    "kind of store": ("features: {kind: s3}", ["features: kind s3 needs a url"]),
    "store without a root": ("features: {kind: shared_dir}", ["features: "]),
    "unknown key": ("automations: true", ["unknown key automations; did you mean automation?"]),
    "number with a unit": ("budget: {gpu_hours_per_week: 200h}", ["budget.gpu_hours_per_week"]),
    "empty section": ("budget: {}", ["budget.gpu_hours_per_week is missing"]),
    "price in words": ("prices: {gpu_hour: 2.5 EUR}", ["prices"]),
    "cron": ("retention: {cron: weekly}", ["retention.cron"]),
    "kind of notification": (
        "notifications: [{kind: email, url: x@y}]",
        ["notifications.0.kind", "notifications.0.url"],
    ),
    "event of a notification": (
        "notifications: [{kind: webhook, name: a, url: 'https://a.example/x', events: [failures]}]",
        ["notifications.0"],
    ),
    "unknown target of a notification": (
        "notifications: [{kind: webhook, name: a, url: 'https://a.example/x', targets: [smal]}]",
        ["notifications.0.targets: no target smal; did you mean small?"],
    ),
    "two at once": ("automations: true\nretention: {cron: weekly}", ["retention.cron", "unknown key automations"]),
    "not YAML": ("var: [", ["deployment.yaml"]),
    "not a mapping": ("- var", ["deployment.yaml"]),
    "link to nowhere": (None, ["a link to nowhere"]),
}
LAUNCHERS: dict[str, dict[str, Any]] = {"plain target": {}, "target with a launcher": {"launcher": {"threads": 2}}}


def check(fleet, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", "--registry", str(fleet.registry.root), *arguments])


@pytest.mark.parametrize("entry", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize(("text", "messages"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_deployment_is_one_line(fleet, text: str | None, messages: list[str], entry: dict[str, Any]):
    fleet.write(evaluation={"slices": ["weather"]}, **entry)
    path = fleet.registry.root / "deployment.yaml"
    if text is None:
        path.symlink_to("nowhere")
    else:
        path.write_text(text)
    told = check(fleet)
    assert (told.exit_code, type(told.exception)) == (1, SystemExit)
    about = [line for line in told.stdout.splitlines() if "deployment.yaml" in line]
    assert len(about) == len(messages)
    assert all(len(line) <= 200 for line in about)
    assert all(line.startswith("error: ") and message in line for line, message in zip(about, messages, strict=True)), (
        about
    )
    found = json.loads(check(fleet, "--json").stdout)
    assert [f"error: {shorten_paths(problem, fleet.registry.root)}" for problem in found["problems"]] == about
    [error] = found["targets"]["small"]["errors"]
    assert "no eval set has a column 'weather'" in error
    assert f"{len(messages) + 1} problems" in told.stderr


def test_a_folder_of_results_that_cannot_be_made_is_one_line(fleet):
    """Its parent's mode allows everything."""
    (fleet.registry.root / "deployment.yaml").write_text("var: /proc/results")
    told = check(fleet)
    assert (told.exit_code, type(told.exception)) == (1, SystemExit)
    [error] = [line for line in told.stdout.splitlines() if "error" in line]
    assert "deployment: var: /proc cannot be written to (No such file or directory)" in error


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


@pytest.fixture
def looks(monkeypatch):
    """The names of the expensive checks that ran, in order."""
    seen = []

    def watched(plain, name, *args):
        seen.append(name)
        plain(*args)

    for module, name in ((drafts, "check_drafts"), (sample, "check_sample")):
        monkeypatch.setattr(module, name, partial(watched, getattr(module, name), name))
    return seen


@pytest.fixture
def examine(fleet, tiny_target, tmp_path):
    """Examine the fleet's target, with the arguments that a test changes."""

    def examined(**changed):
        given = {"target": fleet.registry.load_target("small"), "files": tiny_target, "data": {"chats": "a"}, **changed}
        return examine_before_run(registry=fleet.registry, cache_folder=tmp_path / "kept", **given)

    return examined


def test_what_has_not_changed_is_not_looked_at_again(fleet, tiny_target, examine, looks, monkeypatch):
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 0.5}}})
    first = examine()
    assert [one.severity for one in first] == ["warning"]
    assert examine() == first
    assert looks == ["check_drafts", "check_sample"]
    examine(target=fleet.registry.load_target("small").model_copy(update={"max_length": 80}))
    examine(files=tiny_target.model_copy(update={"digest": "other"}))
    examine(data={"chats": "b"})
    monkeypatch.setattr(examination, "REVISION", 9)
    examine()
    assert len(looks) == 10


def test_a_mistake_and_a_damaged_verdict_are_looked_at_again(fleet, examine, looks, tmp_path):
    good = fleet.registry.load_target("small")
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 9}}})
    for _ in range(2):
        assert any(one.severity == "error" for one in examine())
    assert len(looks) == 4
    assert examine(target=good) == ()
    [path] = (tmp_path / "kept").iterdir()
    path.write_text("{")
    assert examine(target=good) == ()
    assert len(looks) == 8


@pytest.mark.parametrize("error", [ConfigError, DataError])
def test_an_error_of_several_lines_is_as_many_findings(error):
    findings = Findings()
    with findings.collect_errors():
        raise error("a: unknown key\nb: expected a number")
    assert findings.errors == ["a: unknown key", "b: expected a number"]


def test_what_is_no_error_of_a_user_is_not_collected():
    findings = Findings()
    with pytest.raises(KeyError), findings.collect_errors():
        raise KeyError("a defect")
    assert not findings.found


ENTRY = {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64, "layer_ids": [2, 4, 5]}}}


def size_of(fleet, layers: int) -> float:
    """GB of the tiny target's first layers."""
    header = read_header(fleet.tiny_folder / "model.safetensors")
    width = {"F32": 4, "BF16": 2, "F16": 2}
    below = tuple(f"model.layers.{layer}." for layer in range(layers))
    found = [one for name, one in header.items() if name.startswith(below)]
    total = 0
    for one in found:
        count = width[one.dtype]
        for size in one.shape:
            count *= size
        total += count
    return total / 1e9


@pytest.mark.parametrize(
    ("share", "allowed", "refused"), [(0.5, False, True), (0.5, True, False), (1.0001, False, False)]
)
def test_a_budget_below_the_lowest_tap_is_refused(fleet, share: float, allowed: bool, refused: bool):
    capture = {"probe_gb": size_of(fleet, 2) * share, "allow_unprobed": allowed}
    fleet.write(strategies=ENTRY, capture=capture)
    errors = fleet.check().errors
    assert len(errors) == refused
    assert all("of the 2 layer(s) before the first that drafts read" in error for error in errors)
