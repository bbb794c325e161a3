"""Deployment modes."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataflow_toys import toy_slim_ref

from draftworks.errors import ConfigError
from draftworks.stream.controller import DEPLOYMENT_MODES, resolve_control_plane
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore


def test_a_local_run_keeps_its_state_in_memory_and_acknowledges_nothing_durably(tmp_path: Path) -> None:
    plane = resolve_control_plane("local_colocated", "run")
    assert isinstance(plane.controller.store, InMemoryMetadataStore)
    assert not plane.durable_ack
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", DEPLOYMENT_MODES[1:])
def test_other_modes_keep_their_state_in_the_database(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "control" / "plane.db"
    plane = resolve_control_plane(mode, "run", path, consumer="second", max_attempts=5)
    assert isinstance(plane.controller.store, SQLiteMetadataStore)
    assert plane.durable_ack
    assert plane.controller.consumer == "second"
    plane.controller.commit_samples([toy_slim_ref("a")])
    plane.controller.close()
    again = resolve_control_plane(mode, "run", path)
    assert again.controller.commit_samples([toy_slim_ref("a")]).duplicates == ("a",)
    given = resolve_control_plane(mode, "run", store=InMemoryMetadataStore())
    assert given.durable_ack


@pytest.mark.parametrize("mode", DEPLOYMENT_MODES[1:])
def test_a_mode_that_keeps_state_needs_one_place_for_it(mode: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metadata_db_path"):
        resolve_control_plane(mode, "run")
    with pytest.raises(ConfigError, match="metadata_db_path"):
        resolve_control_plane(mode, "run", tmp_path / "plane.db", InMemoryMetadataStore())


def test_what_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of local_colocated, .* found 'remote'"):
        resolve_control_plane("remote", "run")
    with pytest.raises(ConfigError, match="keeps no state"):
        resolve_control_plane("local_colocated", "run", tmp_path / "plane.db")
