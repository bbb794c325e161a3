"""What only `make test-long` asks has a representative in the gate, and none goes unnoticed."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverings import gate_or_long
from launcher_contract import IN_GATE

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = tomllib.loads((ROOT / "tests" / "representatives.toml").read_text())["moved"]
NOT_IN_CI = {"long", "ray", "gpu"}


def find_marks(nodes: list[ast.expr]) -> set[str]:
    """Names of `pytest.mark.NAME` in expressions: of decorators, or of a module's `pytestmark`."""
    parts = (part for node in nodes for part in ast.walk(node))
    marks = (part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute))
    return {mark.attr for mark in marks if mark.value.attr == "mark"}


def find_own_marks(function: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Marks of the whole function or class: not those of single cases within `parametrize`."""
    plain = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return find_marks(list(plain))


def list_tests() -> Iterator[tuple[str, set[str]]]:
    """Each test, as `path::name` or `path::class::name`, with its marks and those of its class and module."""
    contracts = dict(list_contracts())
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        settings = [each for each in module.body if isinstance(each, ast.Assign)]
        common = find_marks([each.value for each in settings if ast.unparse(each.targets[0]) == "pytestmark"])
        place = str(path.relative_to(ROOT))
        yield from list_functions(module, place, common)
        for group in (each for each in module.body if isinstance(each, ast.ClassDef)):
            own = common | find_own_marks(group)
            yield from list_functions(group, f"{place}::{group.name}", own)
            kept = find_kept(group)
            for name in (name for base in group.bases for name in contracts.get(ast.unparse(base), ())):
                yield f"{place}::{group.name}::{name}", own | ({"long"} if kept and name not in kept else set())


def list_functions(body: ast.Module | ast.ClassDef, place: str, common: set[str]) -> Iterator[tuple[str, set[str]]]:
    for each in body.body:
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
            yield f"{place}::{each.name}", common | find_own_marks(each)


def list_contracts() -> Iterator[tuple[str, list[str]]]:
    """Classes of tests that modules inherit, by name, with all that they ask, inherited or not."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "toys").glob("*.py")):
        for group in (each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef)):
            inherited = [name for base in group.bases for name in found.get(ast.unparse(base), [])]
            own = [
                each.name for each in group.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
            ]
            found[group.name] = inherited + own
            yield group.name, found[group.name]


def find_kept(group: ast.ClassDef) -> set[str]:
    """Names that `@long_but_for(*IN_GATE)` keeps in the gate; empty without it."""
    called = [ast.unparse(each.func) for each in group.decorator_list if isinstance(each, ast.Call)]
    return set(IN_GATE) if "long_but_for" in called else set()


def test_what_is_wholly_long_is_listed_with_a_representative_that_ci_asks():
    marks = dict(list_tests())
    long = {test for test, own in marks.items() if "long" in own}
    listed = [each["test"] for each in MANIFEST]
    assert sorted(listed) == sorted(long), "tests/representatives.toml lists what is long, each once"
    gone = {each["representative"] for each in MANIFEST} - marks.keys()
    assert not gone, "representatives that are no tests any more: name others, or bring them back"
    outside = {each["representative"] for each in MANIFEST if marks[each["representative"]] & NOT_IN_CI}
    assert not outside, "representatives that CI does not run"
    assert all(each["why"].strip() for each in MANIFEST)


def test_a_product_leaves_some_of_its_cases_in_the_gate():
    with pytest.raises(ValueError, match="no case is left in the gate"):
        gate_or_long([1, 2, 3], gate=[4])
