"""Versions of Python and of libraries, against the supported ranges and the tested pins. Nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftworks.preflight.installation.probes import Line

AREA = "versions"
DISTRIBUTION = "draftworks"
_SHOWN = ("torch", "dagster", "transformers")


@dataclass(frozen=True)
class SupportedVersions:
    """What a checkout says of versions.

    Attributes:
        python: range of Python, such as ">=3.11".
        required: ranges of the core's libraries by name, such as ">=1.13,<1.14".
        optional: the same of extras, by extra.
        tested: exact versions by normalized name.
    """

    python: str
    required: Mapping[str, str]
    optional: Mapping[str, Mapping[str, str]]
    tested: Mapping[str, str]

    @classmethod
    def read(cls, checkout: Path) -> SupportedVersions:
        """Read pyproject.toml and constraints.txt of a checkout. Raises OSError or ValueError if one cannot be read."""
        project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
        lines = (checkout / "constraints.txt").read_text().splitlines()
        pins = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
        extras = project.get("optional-dependencies", {})
        return cls(
            project["requires-python"],
            _parse_requirements(project["dependencies"]),
            {extra: _parse_requirements(texts) for extra, texts in extras.items()},
            {_normalize(name): version.split(";")[0].strip() for name, _, version in pins},
        )


def probe_versions(checkout: Path) -> Iterator[Line]:
    """Yield a line for Python, for the main libraries, and for each library outside of its range."""
    from packaging.specifiers import SpecifierSet

    try:
        supported = SupportedVersions.read(checkout)
    except (OSError, ValueError, KeyError) as error:
        yield Line(AREA, "warning", f"supported versions are not known: {error}", "install Draftworks from a checkout")
        return
    python = platform.python_version()
    if python in SpecifierSet(supported.python):
        yield Line(AREA, "ok", f"Python {python} ({sys.executable})")
    else:
        yield Line(
            AREA,
            "problem",
            f"Python {python}: expected {supported.python}",
            "make the environment again: make clean; make",
        )
    found = {name: _find_version(name) for name in supported.required}
    shown = [f"{name} {found[name]}" for name in _SHOWN if found.get(name)]
    yield Line(AREA, "ok", f"libraries: {', '.join(shown)}")
    for name, expected in supported.required.items():
        yield from _judge(name, expected, found[name], f"pip install -c constraints.txt -e {checkout}", required=True)
    for extra, ranges in supported.optional.items():
        for name, expected in ranges.items():
            todo = f"pip install -c constraints.txt -e '{checkout}[{extra}]'"
            yield from _judge(name, expected, _find_version(name), todo, required=False)
    yield from _compare_with_tested(supported)


def _judge(name: str, expected: str, found: str | None, todo: str, required: bool) -> Iterator[Line]:
    from packaging.specifiers import SpecifierSet

    if found is None and required:
        yield Line(AREA, "problem", f"{name}: expected {expected}, found none", todo)
    elif found is not None and not SpecifierSet(expected).contains(found, prereleases=True):
        yield Line(AREA, "problem", f"{name} {found}: expected {expected}", todo)


def _compare_with_tested(supported: SupportedVersions) -> Iterator[Line]:
    """Yield one line about libraries whose version is supported but not the tested one. Local parts (+cpu) do not count."""
    others = []
    for name in supported.required:
        found, tested = _find_version(name), supported.tested.get(_normalize(name))
        if found is not None and tested is not None and found.partition("+")[0] != tested.partition("+")[0]:
            others.append(f"{name} {found} (tested: {tested})")
    if others:
        yield Line(AREA, "ok", f"supported, but not the versions of the tests: {', '.join(others)}")


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_requirements(texts: list[str]) -> dict[str, str]:
    from packaging.requirements import Requirement

    return {found.name: str(found.specifier) for found in map(Requirement, texts)}


def _normalize(name: str) -> str:
    return name.split("[")[0].strip().lower().replace("_", "-").replace(".", "-")
