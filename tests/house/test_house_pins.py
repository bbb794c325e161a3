"""Versions that are said in several places are the same in all of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> dict[str, str]:
    """Versions of constraints.txt by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}


def test_hooks_use_the_linter_that_is_pinned():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    wanted = {each for repo in config["repos"] for hook in repo["hooks"] for each in hook["additional_dependencies"]}
    assert all("==" in each for each in wanted)
    assert [each for each in wanted if each.startswith("ruff==")] == [f"ruff=={pinned()['ruff']}"]


def test_every_tool_of_an_extra_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {each.split(">=")[0].split("[")[0].lower() for extra in extras.values() for each in extra}
    assert names <= pinned().keys()


def test_environments_that_have_the_torch_of_venv_ask_for_that_torch():
    """pip would install another one into them, see tools/link_torch.py."""
    for name in ("sglang", "speculators", "specforge"):
        lines = (ROOT / "tools" / f"{name}-requirements.txt").read_text().splitlines()
        assert f"torch=={pinned()['torch']}" in lines, name
