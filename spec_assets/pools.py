"""The pool in which each step waits: that of the launcher of its program's jobs, for the run's target.

Dagster knows one pool per asset, whatever the partition. So assets are defined in the default pool, and a run puts its
steps into those of its target.
"""

from __future__ import annotations

from typing import Any

from draftworks.config.launcher_base import DEFAULT_POOL
from draftworks.errors import DraftworksError
from draftworks.targets.registry import Registry

PROGRAM_TAG = "draftworks/program"


def wait_in_pool_of(program: str) -> dict[str, Any]:
    """Return the options of an asset whose step waits in the pool of a program's launcher."""
    return {"pool": DEFAULT_POOL, "op_tags": {PROGRAM_TAG: program}}


def assign_pools(plan: Any, target: str | None, registry: Registry) -> Any:
    """Return a plan whose steps wait in the pools of their launchers for a target.

    The plan is as it was where the target's entry cannot be read, which its first step reports.
    """
    if target is None:
        return plan
    programs = {step.tags[PROGRAM_TAG] for step in plan.steps if PROGRAM_TAG in (step.tags or {})}
    try:
        spec = registry.load_target(target)
        pools = {program: registry.resolve_launcher(spec, program).pool for program in programs}
    except DraftworksError:
        return plan
    steps = {handle: _assign_pool(step, pools) for handle, step in plan.step_dict.items()}
    return plan._replace(step_dict=steps, step_dict_by_key={step.key: step for step in steps.values()})


def _assign_pool(step: Any, pools: dict[str, str | None]) -> Any:
    program = (step.tags or {}).get(PROGRAM_TAG)
    return step if program is None else step._replace(pool=pools[program])
