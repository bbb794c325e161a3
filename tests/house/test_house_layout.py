"""The shape of the house: imports point in one direction, and no file grows past what a person reads at once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "draftworks"
ROOMS = [
    *("storage", "config", "distributed", "mooncake", "data", "features", "targets", "handover", "servers", "sglang"),
    "vllm",
    *(
        "drafts",
        "capture",
        "evaluation",
        "export",
        "strategies",
        "training",
        "stream",
        "bundle",
        "service",
        "production",
        "swap",
        "recording",
        "fleet",
        "planning",
        "decision",
        "page",
        "notifications",
        "retention",
        "preflight",
    ),
    "programs",
]
"""From the ground floor up: a room imports itself and what is below, and `errors`."""
SERVING_DEPENDENCIES = {"torch", "numpy", "safetensors", "pydantic", "draftworks", "sglang", "vllm", "xxhash"}


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return frozenset(names)


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def test_every_module_of_the_engine_is_in_a_room():
    # A room that went may leave a folder of bytecode where it was pulled.
    assert {path.parts[0] for path in (each.relative_to(ENGINE) for each in ENGINE.glob("*/**/*.py"))} == set(ROOMS)
    assert {path.name for path in ENGINE.glob("*.py")} == {"__init__.py", "errors.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_engine_rooms_import_downwards_only(room: str):
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    for path in (ENGINE / room).rglob("*.py"):
        for name in imported_modules(path):
            parts = name.split(".")
            assert not (parts[0] == "draftworks" and len(parts) > 1 and parts[1] in above), f"{path} imports {name}"


def test_the_engine_never_imports_dagster_or_the_rooms_around_it():
    outside = {"dagster", "spec_assets", "resources", "jobs", "sensors"}
    for path in python_files("draftworks"):
        assert not {name.split(".")[0] for name in imported_modules(path)} & outside, path


def test_what_runs_in_a_serving_environment_needs_nothing_it_lacks():
    import sys

    rooms = [path for room in ("features", "mooncake", "handover") for path in (ENGINE / room).rglob("*.py")]
    for path in [
        *rooms,
        ENGINE / "sglang" / "hook.py",
        *(ENGINE / "vllm" / f"{name}.py" for name in ("capture_rows", "connector")),
    ]:
        roots = {name.split(".")[0] for name in imported_modules(path)} - set(sys.stdlib_module_names)
        assert roots <= SERVING_DEPENDENCIES, f"{path} imports {roots - SERVING_DEPENDENCIES}"


def test_nothing_reads_pickle():
    for path in python_files("draftworks", "spec_assets", "resources", "jobs", "sensors"):
        assert "pickle" not in imported_modules(path), path
        text = path.read_text()
        assert "torch.load(" not in text or "weights_only=True" in text, path


def test_no_file_is_longer_than_450_lines():
    folders = ("draftworks", "spec_assets", "resources", "jobs", "sensors", "tests", "tools", "benchmarks")
    assert not [str(p) for p in python_files(*folders) if len(p.read_text().splitlines()) > 450]


def test_transformers_never_asks_whether_to_run_code_of_a_model():
    """It asks on stdin unless every call says no."""
    loaders = {"from_pretrained", "from_config"}
    for path in python_files("draftworks", "spec_assets", "resources", "jobs", "sensors", "benchmarks"):
        text = path.read_text()
        if not any(loader in text for loader in loaders):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in loaders:
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert said.get("trust_remote_code") == "False", f"{path}, line {node.lineno}"


def test_one_module_imports_what_dagster_does_not_promise():
    for path in python_files("spec_assets", "resources", "jobs", "sensors"):
        private = {name for name in imported_modules(path) if name.startswith("dagster._")}
        assert not private or path.name == "dagster_internals.py", f"{path} imports {private}"


def test_no_module_imports_itself_by_way_of_others():
    """Imports for type checkers count: a circle of two is read as one."""
    files = python_files("draftworks", "resources", "sensors", "jobs", "spec_assets")
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    below = {name: imported_modules(path) & set(modules) - {name} for name, path in modules.items()}
    while leaves := [name for name, imports in below.items() if not imports & set(below)]:
        for name in leaves:
            del below[name]
    assert not below, f"in or above a circle: {sorted(below)}"
