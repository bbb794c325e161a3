"""Plugin of pytest: a module that leaves processes, ports, shared memory or signal handlers fails, and they are ended."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from leftovers import LEAVE_S, LeftoverWatch, is_supported

WATCH = pytest.StashKey[LeftoverWatch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leave_s", "seconds in which what a module has left may still end by itself", default=str(LEAVE_S))


def pytest_configure(config: pytest.Config) -> None:
    if is_supported():  # elsewhere it is told by nobody what is left
        config.stash[WATCH] = LeftoverWatch(leave_s=float(config.getini("leave_s")))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a fixture of the session starts is left to it."""
    watch = request.config.stash.get(WATCH, None)
    if watch is None or fixturedef.scope not in ("session", "package"):
        return (yield)
    with watch.lasting():
        return (yield)


@pytest.fixture(scope="session")
def leftover_watch(request: pytest.FixtureRequest) -> LeftoverWatch:
    """For fixtures of the session whose servers a test may have started again: see `LeftoverWatch.excuse`."""
    return request.config.stash.get(WATCH, None) or LeftoverWatch()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before all other fixtures of a module, so that it looks after they are gone."""
    watch = request.config.stash.get(WATCH, None)
    if watch is None:
        yield
        return
    watch.begin()
    yield
    left = watch.end()
    assert not left, f"{request.node.name} has left: {'; '.join(left)}"
