"""Private modules of Dagster, imported here alone. Dagster is pinned below 1.14 because of them.

Each of these has no public counterpart: an executor that runs some steps in the run's own process calls what the
in-process and the multiprocess executor are made of; the processes of a run are named only in the data of its events; an
instance of another folder is made from its reference; and `draftworks run` is Dagster's command without its help.
"""

from __future__ import annotations

from typing import Any

from dagster._core.errors import DagsterUserCodeProcessError
from dagster._core.events import EngineEventData
from dagster._core.execution.api import ExecuteRunWithPlanIterable
from dagster._core.execution.context_creation_job import PlanExecutionContextManager
from dagster._core.execution.plan.execute_plan import inner_plan_execution_iterator
from dagster._core.instance.ref import InstanceRef
from dagster._core.system_config.objects import ResolvedRunConfig

__all__ = [
    "PRELOADED",
    "UNUSED_GATES",
    "DagsterUserCodeProcessError",
    "EngineEventData",
    "ExecuteRunWithPlanIterable",
    "InstanceRef",
    "PlanExecutionContextManager",
    "ResolvedRunConfig",
    "create_command",
    "inner_plan_execution_iterator",
]

PRELOADED = ("dagster._core.executor.multiprocess", "dagster._core.storage.sqlite_storage")
"""Modules that a step's process needs and `import dagster` does not import."""
UNUSED_GATES = "dagster._core.execution.plan.active"
"""Logger that warns of every check that is skipped together with its asset, although that is normal here."""


def create_command() -> Any:
    """Return the command `dagster`, which takes half a second to import."""
    from dagster._cli import create_dagster_cli

    return create_dagster_cli()
