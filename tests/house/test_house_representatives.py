"""What only `make test-long` asks has a representative in the gate, and none goes unnoticed.
Coverings ask what they promise: each pair of values, each question, and the rest of a product in `make test-long`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from coverings import cover, gate_or_long, long_but_for, pairwise
from hypothesis import given
from hypothesis import strategies as st
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


AXES = st.lists(st.integers(1, 5).map(lambda size: tuple(range(size))), min_size=2, max_size=4)


@given(axes=AXES)
def test_each_two_values_of_two_axes_meet_in_a_pairwise_covering(axes: list[tuple[int, ...]]):
    cells = pairwise(*axes)
    assert set(cells) <= set(product(*axes))
    for one, other in combinations(range(len(axes)), 2):
        assert {(cell[one], cell[other]) for cell in cells} == set(product(axes[one], axes[other]))
    assert cells == pairwise(*axes)


def test_a_pairwise_covering_is_much_smaller_than_the_product():
    assert len(pairwise("abc", "def", "ghi", "jkl")) <= 12 < 3**4
    assert pairwise([{}], ["values need no hash"]) == [({}, "values need no hash")]


@given(cells=st.lists(st.frozensets(st.integers(0, 9)), max_size=12))
def test_a_covering_answers_what_all_cells_answer(cells: list[frozenset[int]]):
    chosen = cover(range(len(cells)), lambda i: cells[i])
    assert set().union(*(cells[i] for i in chosen)) == set().union(*cells)
    assert chosen == sorted(set(chosen))


def marks_of(parameters: list) -> list[list[str]]:
    return [[mark.name for mark in each.marks] for each in parameters]


@pytest.mark.parametrize("gate", [["b"], lambda case: case == "b"])
def test_what_is_not_in_the_gate_is_long(gate: object):
    cases = ["a", "b", pytest.param("c", id="third", marks=pytest.mark.slow)]
    made = gate_or_long(cases, gate)
    assert [each.values for each in made] == [("a",), ("b",), ("c",)]
    assert marks_of(made) == [["long"], [], ["slow", "long"]]
    assert made[2].id == "third"


def test_cells_are_judged_by_all_their_values():
    cells = [(1, {}), pytest.param(2, {}), (3, {})]
    made = gate_or_long(cells, [(2, {})])
    assert [each.values for each in made] == [(1, {}), (2, {}), (3, {})]
    assert marks_of(made) == [["long"], [], ["long"]]


class Contract:
    def test_one(self): ...

    @pytest.mark.parametrize("value", [1, 2])
    def test_two(self, value: int): ...


def names_of_marks(contract: type, test: str) -> list[str]:
    return [mark.name for mark in getattr(getattr(contract, test), "pytestmark", [])]


def test_a_contract_is_long_but_for_some_of_its_tests_and_only_where_it_is_asked_so():
    @long_but_for("test_one")
    class Real(Contract):
        def test_own(self): ...

    assert [names_of_marks(Real, test) for test in ("test_one", "test_two", "test_own")] == [
        [],
        ["parametrize", "long"],
        [],
    ]
    assert names_of_marks(Contract, "test_two") == ["parametrize"]
    assert Real.test_two is not Contract.test_two
    assert Real.test_two.__qualname__ == Contract.test_two.__qualname__


def test_what_is_long_of_a_contract_is_marked_in_the_same_order_in_every_process():
    """Workers of pytest-xdist that collect in different orders run nothing; the order of a set of names is random."""
    names = [f"test_{letter}" for letter in "hgfedcba"]
    contract = type("Contract", (), {name: lambda self: None for name in names})
    real = long_but_for("test_a")(type("Real", (contract,), {}))
    assert [name for name in vars(real) if name.startswith("test_")] == sorted(names)[1:]


def test_a_gate_of_a_contract_names_tests_that_it_has():
    with pytest.raises(AssertionError, match=r"Contract inherits no \['test_onee'\]"):
        long_but_for("test_onee")(type("Contract", (Contract,), {}))
