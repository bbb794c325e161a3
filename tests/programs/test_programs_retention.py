"""The commands usage, prune, pin and unpin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from retention_toys import make_features, make_result
from typer.testing import CliRunner

from draftworks.programs.cli import app


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    (tmp_path / "deployment.yaml").write_text("var: var\nretention: {keep_days: 0}\n")
    return tmp_path


def call(registry: Path, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--registry", str(registry)])
    assert done.exit_code == 0, done.output
    return done.output


def test_prune_shows_what_would_go_and_removes_it_only_when_told(registry: Path):
    old = make_result(registry / "var", "x_draft", lr=1)
    new = make_result(registry / "var", "x_draft", lr=2)
    shown = call(registry, "prune")
    assert f"x_draft {old.path.name} of a: nothing in use was made from it" in shown
    assert "Remove with: draftworks prune --yes" in shown
    assert old.path.exists()
    assert "removed 1: " in call(registry, "prune", "--yes")
    assert (old.path.exists(), new.path.exists()) == (False, True)
    assert json.loads(call(registry, "prune", "--json")) == {"would_remove": [], "bytes": 0}


def test_usage_adds_up(registry: Path):
    make_result(registry / "var", "x_draft")
    make_features(registry / "var", [1], "tokens")
    found = json.loads(call(registry, "usage", "--json"))
    assert {(each["kind"], each["owner"]) for each in found["sizes"]} == {
        ("drafts", "a"),
        ("data", "a"),
        ("features", "0123456789abcdef"),
    }
    shown = call(registry, "usage")
    assert "together" in shown
    assert "a (weights 01234567)  features" in shown


def test_a_pinned_result_stays_until_it_is_unpinned(registry: Path):
    old = make_result(registry / "var", "x_draft", lr=1)
    assert "pinned x_draft" in call(registry, "pin", "a", "x_draft", "--why", "for the paper")
    make_result(registry / "var", "x_draft", lr=2)
    assert "for the paper" in call(registry, "usage")
    call(registry, "prune", "--yes")
    assert old.path.exists()
    call(registry, "unpin", "a", "x_draft", old.path.name)
    call(registry, "prune", "--yes")
    assert not old.path.exists()


@pytest.mark.parametrize(
    "words", [("pin", "a", "no_such_asset"), ("pin", "../a", "x"), ("unpin", "a", "x_draft", "0123456789abcdef")]
)
def test_what_is_not_there_is_one_line(registry: Path, words: tuple[str, ...]):
    done = CliRunner().invoke(app, [*words, "--registry", str(registry)])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
