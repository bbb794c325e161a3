"""Which cells of a product of parameters the gate asks, so that a reader sees both: the product and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations, product
from types import FunctionType
from typing import Any, TypeVar

import pytest

Parameter = type(pytest.param())
Contract = TypeVar("Contract", bound=type)


def gate_or_long(cases: Iterable[Any], gate: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters for all cases: those in `gate`, or for which it returns true, as they are; the others for `make test-long`.

    A case is one value, a tuple of several, or a `pytest.param`, which is judged by its values.

    Raises:
        ValueError: no case is left in the gate.
    """
    in_gate = gate if callable(gate) else gate.__contains__
    parameters = [_as_parameter(case) for case in cases]
    kept = [bool(in_gate(_list_values(each))) for each in parameters]
    if not any(kept):
        raise ValueError("no case is left in the gate: a product is represented by some of its cases")
    return [each if keep else _for_long(each) for each, keep in zip(parameters, kept, strict=True)]


def long_but_for(*gate: str) -> Callable[[Contract], Contract]:
    """Class decorator: of the tests that a class inherits, all but those of these names are for `make test-long`.

    For a contract that is asked in full of what is cheap, and in part of a real server.
    """

    def mark(contract: Contract) -> Contract:
        # In the same order in every worker of pytest-xdist, which collect the same or none.
        inherited = [name for name in dir(contract) if name.startswith("test_") and name not in vars(contract)]
        assert {*inherited} >= {*gate}, f"{contract.__name__} inherits no {sorted({*gate} - {*inherited})}"
        for name in (each for each in inherited if each not in gate):
            setattr(contract, name, pytest.mark.long(_copy(getattr(contract, name))))
        return contract

    return mark


def cover(cells: Iterable[Any], questions: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return some cells, in their order, that answer each question which any cell answers; the same in every run.

    The next one is always the first that answers most of what is still open.
    """
    known = list(cells)
    answers = [set(questions(cell)) for cell in known]
    open_questions = set().union(*answers)
    chosen = set()
    while open_questions:
        best = max(range(len(known)), key=lambda i: (len(answers[i] & open_questions), -i))
        chosen.add(best)
        open_questions -= answers[best]
    return [known[i] for i in sorted(chosen)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cells of the product of `axes`, in its order, in which each two values of two axes meet."""
    places = product(*(range(len(axis)) for axis in axes))
    found = cover(places, lambda cell: combinations(enumerate(cell), 2))
    return [tuple(axis[i] for axis, i in zip(axes, cell, strict=True)) for cell in found]


def _copy(test: FunctionType) -> FunctionType:
    """A mark belongs to a function, and other classes inherit the same one."""
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.__qualname__, copy.__doc__, copy.__kwdefaults__ = test.__qualname__, test.__doc__, test.__kwdefaults__
    copy.__annotations__ = test.__annotations__
    vars(copy).update(vars(test))
    return copy


def _as_parameter(case: Any) -> Any:
    if isinstance(case, Parameter):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _list_values(parameter: Any) -> Any:
    return parameter.values if len(parameter.values) > 1 else parameter.values[0]


def _for_long(parameter: Any) -> Any:
    return pytest.param(*parameter.values, marks=[*parameter.marks, pytest.mark.long], id=parameter.id)
