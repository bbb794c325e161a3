"""Coverings ask what they promise: each pair of values, each question, and the rest of a product in `make test-long`."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from coverings import cover, gate_or_long, long_but_for, pairwise
from hypothesis import given
from hypothesis import strategies as st

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
