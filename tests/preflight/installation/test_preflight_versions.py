"""Versions are compared with the ranges and pins of the checkout; what is missing or outside is a problem."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from draftworks.preflight.installation.machine_probes import SupportedVersions, probe_versions

CHECKOUT = Path(__file__).resolve().parents[3]


def write_checkout(root: Path, required: str = "", extra: str = "", python: str = ">=3.11", pins: str = "") -> Path:
    dependencies, optional = ([each] if each else [] for each in (required, extra))
    (root / "pyproject.toml").write_text(
        f"[project]\nrequires-python = {python!r}\ndependencies = {dependencies}\n"
        f"[project.optional-dependencies]\nmore = {optional}\n"
    )
    (root / "constraints.txt").write_text(f"# pins\n{pins}\n")
    return root


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"required": "pydantic>=99"}, "expected >=99"),
        ({"required": "no-such-library>=1"}, "no-such-library: expected >=1, found none"),
        ({"extra": "pydantic<1"}, "expected <1"),
        ({"python": "<3"}, "expected <3"),
    ],
)
def test_what_is_missing_or_outside_its_range_is_a_problem_with_a_command(tmp_path: Path, given, words: str):
    found = [line for line in probe_versions(write_checkout(tmp_path, **given)) if line.severity == "error"]
    assert len(found) == 1
    assert words in found[0].text
    assert found[0].remedy


def test_a_library_of_an_extra_may_be_missing(tmp_path: Path):
    found = probe_versions(write_checkout(tmp_path, extra="no-such-library>=1"))
    assert {line.severity for line in found} == {"ok"}


def test_a_supported_version_that_was_not_tested_is_told(tmp_path: Path):
    version = importlib.metadata.version("pydantic")
    for pin, told in ((version, False), (f"{version}+cpu", False), ("2.0.1", True)):
        found = list(probe_versions(write_checkout(tmp_path, "pydantic>=2", pins=f"Pydantic=={pin}")))
        assert {line.severity for line in found} == {"ok"}
        assert any("(tested: 2.0.1)" in line.text for line in found) is told


def test_without_a_checkout_it_says_so(tmp_path: Path):
    assert [line.severity for line in probe_versions(tmp_path)] == ["warning"]


def test_this_environment_has_what_it_needs():
    supported = SupportedVersions.read(CHECKOUT)
    assert "torch" in supported.required
    assert not [line for line in probe_versions(CHECKOUT) if line.severity == "error"]
