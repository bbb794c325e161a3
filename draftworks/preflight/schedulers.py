"""Whether the schedulers of targets would take their jobs. A program of its own knows launchers and asks them. Torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from draftworks.config.launchers import LOCAL, PROGRAMS
from draftworks.errors import DraftworksError
from draftworks.targets.registry import Registry


def find_refused_jobs(registry: Registry, names: Sequence[str], limit_s: float | None = None) -> dict[str, list[str]]:
    """Return, by target, why schedulers would not take its jobs.

    Args:
        names: targets that `list_scheduler_users` returned.
        limit_s: seconds after which schedulers count as not answering; None: as long as they take.
    """
    if not names:
        return {}
    command = [sys.executable, "-m", "resources.launcher_checks", str(registry.root), *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(names, [f"launcher: schedulers did not answer within {limit_s:.0f} s"])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return dict.fromkeys(names, [f"launcher: schedulers could not be asked: {last}"])
    return json.loads(done.stdout)


def list_scheduler_users(registry: Registry, names: Sequence[str]) -> list[str]:
    """Return the targets among `names` that have jobs for other machines than this one."""
    return [name for name in names if _uses_scheduler(registry, name)]


def _uses_scheduler(registry: Registry, name: str) -> bool:
    """Whether a target has jobs for other machines than this one. An invalid entry, which is reported, has none."""
    try:
        target = registry.load_target(name)
        specs = [registry.resolve_launcher(target, program) for program in PROGRAMS]
    except DraftworksError:
        return False
    return any(spec.kind != LOCAL or spec.nodes > 1 for spec in specs)
