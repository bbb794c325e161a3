"""Fixtures of the sensors' tests: a fleet, and a Dagster instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from fleets import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two targets with drafts and reports."""
    fleet = Fleet(tmp_path)
    for target in ("one", "two"):
        fleet.add_measured(target)
    return fleet


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """Not entered: contexts enter it, and Dagster allows that only once."""
    found = dg.DagsterInstance.ephemeral()
    yield found
    found.dispose()
