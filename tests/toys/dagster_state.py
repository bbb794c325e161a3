"""What Dagster keeps of an instance that is gone."""

from __future__ import annotations

import sys


def forget_instance() -> None:
    """Dagster 1.13 leaves an instance that was entered twice behind as the current one, and fails when it is gone."""
    loaded = sys.modules.get("dagster._core.storage.defs_state.base")
    if loaded is not None:
        loaded._current_storage.set(None)
