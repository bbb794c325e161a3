"""The libraries that Draftworks programs need in SGLang's Python are listed, pinned, and checked before a start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from draftworks.errors import ConfigError
from draftworks.sglang.environment import PROGRAM_LIBRARIES, build_program_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "import draftworks.programs.capture, draftworks.programs.regenerate, draftworks.capture.engines.sglang_loading"
)


def make_sglang_python(folder: Path, lacking: str = "") -> Path:
    """A stand-in for SGLang's Python, which prints a version, or the libraries that it lacks."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *version*) echo 0.5.23;; *) echo {lacking};; esac\n')
    python.chmod(0o755)
    return python


def read_pinned() -> set[str]:
    lines = (ROOT / "tools" / "sglang-requirements.txt").read_text().splitlines()
    return {normalise(line.partition("==")[0]) for line in lines if "==" in line}


def normalise(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def read_imported_roots(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_all_that_the_programs_import_is_pinned_for_sglangs_environment():
    script = (
        f"{PROGRAMS}; import sys; print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('draftworks.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    roots = set().union(*(read_imported_roots(Path(file)) for file in done.stdout.split()))
    distributions = packages_distributions()
    needed = {
        normalise(distributions.get(root, [root])[0]) for root in roots - set(sys.stdlib_module_names) - {"draftworks"}
    }
    assert {"torch", "pyarrow", "dagster-pipes"} <= needed
    assert needed <= read_pinned()


def test_what_sglang_does_not_bring_is_pinned_as_here():
    here = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    there = (ROOT / "tools" / "sglang-requirements.txt").read_text().splitlines()
    assert {f"{name}=={here[name]}" for name in PROGRAM_LIBRARIES.values()} <= set(there)


def test_a_library_that_is_missing_there_is_named_with_the_command_that_installs_it(tmp_path: Path):
    python = make_sglang_python(tmp_path, lacking="pyarrow dagster_pipes")
    with pytest.raises(ConfigError, match=rf"lacks pyarrow, dagster-pipes.*{python} -m pip install --no-deps pyarrow"):
        build_program_environment(python, tmp_path / "package")


def test_a_program_finds_this_package_there_and_nothing_else_of_ours(tmp_path: Path):
    environment = build_program_environment(make_sglang_python(tmp_path), tmp_path / "package")
    assert environment == {"PYTHONPATH": str(tmp_path / "package")}
    (link,) = (tmp_path / "package").iterdir()
    assert link.resolve() == ROOT / "draftworks"


def test_looking_at_the_environment_imports_no_torch():
    script = "import sys, draftworks.sglang.environment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
