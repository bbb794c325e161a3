"""Checks of this machine for a target whose features stream: the database's disk, and Mooncake. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.preflight.findings import Findings
from draftworks.storage.file_systems import find_mount
from draftworks.targets.registry import Registry

_IMPORT_TIMEOUT_S = 60.0


def check_stream(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    if target.streaming is None:
        return
    _check_control_folder(target, registry, findings)
    if target.streaming.store.kind == "mooncake":
        _check_mooncake(target, registry, findings)


def find_existing(place: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _check_control_folder(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the control plane's database will be in a folder of a local disk that this user may write to."""
    named = None if target.streaming is None else target.streaming.control_folder
    key = "var of the deployment" if named is None else "streaming.control_folder"
    place = registry.resolve_var_folder() if named is None else registry.resolve_path(named)
    existing, mount = find_existing(place), find_mount(place)
    if named is not None and not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        findings.error(
            f"target {target.name}: {key}: expected a folder that this user may write to, found {existing}: correct its "
            "permissions, or name another"
        )
    if mount is not None and mount.is_shared:
        findings.error(
            f"target {target.name}: {key}: {place} is on a network file system ({mount.kind}, on {mount.point}), and the "
            "control plane needs a disk of this host: set streaming.control_folder"
        )


def _check_mooncake(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that each Python whose programs use a stream's Mooncake store can import the library."""
    pythons = [Path(sys.executable)]
    if target.capture.inside_sglang:
        pythons.append(Path(os.path.abspath(registry.root / registry.load_deployment().sglang.python)))
    for python in pythons:
        problem = _find_import_problem(python)
        if problem:
            where = "this Python" if python == pythons[0] else "sglang.python"
            findings.error(
                f"target {target.name}: streaming.store.kind mooncake: {where}: {problem.rpartition(': ')[2][:60]}. Install "
                "draftworks[mooncake], and libibverbs1 libnl-3-200 libnl-route-3-200"
            )


def _find_import_problem(python: Path) -> str:
    """Return why an interpreter cannot import Mooncake; empty if it can."""
    try:
        tried = subprocess.run(
            [str(python), "-c", "import mooncake.store"], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return last if tried.returncode else ""
