"""What only `make test-long` asks has a representative in the gate, and none goes unnoticed."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverings import gate_or_long

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = tomllib.loads((ROOT / "tests" / "representatives.toml").read_text())["moved"]
NOT_IN_CI = {"long", "ray", "gpu"}


def find_marks(nodes: list[ast.expr]) -> set[str]:
    """Names of `pytest.mark.NAME` in expressions: of decorators, or of a module's `pytestmark`."""
    parts = (part for node in nodes for part in ast.walk(node))
    marks = (part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute))
    return {mark.attr for mark in marks if mark.value.attr == "mark"}


def find_own_marks(function: ast.FunctionDef) -> set[str]:
    """Marks of the whole function: not those of single cases within `parametrize`."""
    plain = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return find_marks(list(plain))


def list_tests() -> Iterator[tuple[str, set[str]]]:
    """Each test function as `path::name` with its marks and those of its module."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        settings = [each for each in module.body if isinstance(each, ast.Assign)]
        common = find_marks([each.value for each in settings if ast.unparse(each.targets[0]) == "pytestmark"])
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}::{node.name}", common | find_own_marks(node)


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
