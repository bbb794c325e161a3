"""Check of this machine for a user's own engine: its module. Torch-free."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from draftworks.config.registry_files import TargetSpec
from draftworks.preflight.findings import Findings
from draftworks.preflight.placement import runs_here
from draftworks.targets.registry import Registry


def check_custom_engine(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the module of a user's own engine is there. It is not imported."""
    custom = target.capture.custom
    if custom is None:
        return
    module = custom.entry_point.partition(":")[0]
    if not _has_module(module):
        report = findings.error if runs_here(target, registry, "capture") else findings.warning
        report(
            f"target {target.name}: capture.custom.entry_point {custom.entry_point}: there is no module {module} here. Install "
            "its package, or correct the name"
        )


def _has_module(name: str) -> bool:
    """Whether a module can be found; its packages are not imported. Jobs find modules of their working folder too."""
    top, *rest = name.split(".")
    found = _find_top(top)
    for index in range(len(rest)):
        if found is None or found.submodule_search_locations is None:
            return False
        path = ".".join((top, *rest[: index + 1]))
        found = PathFinder.find_spec(path, list(found.submodule_search_locations))
    return found is not None


def _find_top(name: str) -> ModuleSpec | None:
    try:
        found = find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None
    return found or PathFinder.find_spec(name, [os.getcwd()])
