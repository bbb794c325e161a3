"""The control plane that a deployment mode asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import MetadataStore
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore

LOCAL_COLOCATED = "local_colocated"
DATAFLOW_COLOCATED = "dataflow_colocated"
DISAGGREGATED = "disaggregated"
DEPLOYMENT_MODES = (LOCAL_COLOCATED, DATAFLOW_COLOCATED, DISAGGREGATED)


@dataclass(frozen=True)
class ControlPlane:
    """A run's controller, and whether optimizer steps are acknowledged durably."""

    controller: DataFlowController
    durable_ack: bool


def resolve_control_plane(
    mode: str,
    run_id: str,
    metadata_db_path: Path | None = None,
    store: MetadataStore | None = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> ControlPlane:
    """Return the control plane of a deployment mode.

    `local_colocated` keeps tasks and references in the memory of this process; `dataflow_colocated` and `disaggregated`
    keep them, and acknowledgements, durably.

    Args:
        metadata_db_path: the database, on a disk of this host.
        store: instead of `metadata_db_path`: an open store, such as the client of a control server.
        options: of `DataFlowController`.

    Raises:
        ConfigError: an unknown mode, or not exactly one place for a mode that keeps state, or one for the mode that
            keeps none.
        StoreError: the database cannot be used.
    """
    if mode not in DEPLOYMENT_MODES:
        raise ConfigError(f"deployment_mode: expected one of {', '.join(DEPLOYMENT_MODES)}, found {mode!r}")
    given = (metadata_db_path is not None) + (store is not None)
    if given != (mode != LOCAL_COLOCATED):
        expected = "neither, as it keeps no state" if mode == LOCAL_COLOCATED else "one of the two"
        raise ConfigError(f"deployment_mode {mode}: metadata_db_path or a metadata store: expected {expected}")
    if metadata_db_path is not None:
        store = SQLiteMetadataStore(metadata_db_path)
    controller = DataFlowController(run_id, store or InMemoryMetadataStore(), clock, **options)
    return ControlPlane(controller, mode != LOCAL_COLOCATED)
