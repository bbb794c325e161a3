"""Each mistake in deployment.yaml is one line of `draftworks check`, also as JSON, and the targets are examined all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftworks.programs.cli import app
from draftworks.programs.start import shorten_paths

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
