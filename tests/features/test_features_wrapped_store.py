"""A store around another one hands on every call of the contract, also those that most stores have no use for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from draftworks.features.contracts import FeatureStore
from draftworks.features.wrapped_store import WrappedStore

CALLS = sorted(
    name for name, value in vars(FeatureStore).items() if inspect.isfunction(value) and not name.startswith("_")
)


class Recorder:
    """Writes down the calls that reach it, and answers each with its name."""

    lease_bound, lookahead = True, 7

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> str:
            self.calls.append((name, arguments))
            return name

        return answer


@pytest.mark.parametrize("name", CALLS)
def test_every_call_reaches_the_store_within(name: str):
    within = Recorder()
    store: Any = WrappedStore(within)  # type: ignore[arg-type]
    arguments = tuple(object() for _ in list(inspect.signature(getattr(FeatureStore, name)).parameters)[1:])
    found = getattr(store, name)(*arguments)
    assert within.calls == [(name, arguments)]
    assert found in (name, None)


def test_the_traits_are_those_of_the_store_within():
    store = WrappedStore(Recorder())  # type: ignore[arg-type]
    assert (store.lease_bound, store.lookahead) == (True, 7)
    assert {"stop_waiting", "get", "release"} <= set(CALLS)
