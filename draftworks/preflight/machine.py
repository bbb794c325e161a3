"""Checks of this machine for a target: writable folders, processors, SGLang's Python, API keys. Torch-free."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError
from draftworks.preflight.devices import check_devices
from draftworks.preflight.engines import check_custom_engine
from draftworks.preflight.findings import Findings
from draftworks.preflight.named_outside import check_named_outside
from draftworks.preflight.object_storage import check_object_storage
from draftworks.preflight.streams import check_stream, find_existing
from draftworks.sglang.environment import find_installed_version, require_capturing
from draftworks.targets.registry import Registry

_MAX_RANKS_PER_PROCESSOR = 4
"""More CPU ranks for each processor than this are warned about."""


def check_machine(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    check_writable(registry, findings)
    check_object_storage(registry, findings)
    where, processors = f"target {target.name}", os.cpu_count() or 1
    ranks = {"capture": (target.capture.processes, target.capture.device)}
    ranks |= {
        f"strategies.{n}.training": (e.training.processes, e.training.device) for n, e in target.strategies.items()
    }
    for key, (processes, device) in ranks.items():
        if device == "cpu" and processes > _MAX_RANKS_PER_PROCESSOR * processors:
            findings.warning(f"{where}: {key}.processes: found {processes} on a machine with {processors} processors")
    check_devices(target, registry, findings)
    check_custom_engine(target, registry, findings)
    _check_sglang(target, registry, findings)
    check_stream(target, registry, findings)
    _check_control_address(target, findings)
    check_named_outside(target, findings)


def _check_control_address(target: TargetSpec, findings: Findings) -> None:
    """Check that a stream's control server can listen where it is told to: beside the launcher, so on this machine."""
    control = None if target.streaming is None else target.streaming.control
    if control is None:
        return
    host = control.listen.rpartition(":")[0].strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        findings.error(
            f"target {target.name}: streaming.control.listen: expected an address of this machine, on which the launcher runs, "
            f"found {control.listen}: {error}"
        )


def check_writable(registry: Registry, findings: Findings) -> None:
    """Check that results can be published: each result folder, or its nearest existing parent, is a writable folder."""
    deployment = registry.load_deployment()
    places = {"var": registry.resolve_var_folder()}
    if deployment.features.root is not None:
        places["features.root"] = registry.resolve_path(deployment.features.root)
    if deployment.features.kind == "shared_dir" and not places["features.root"].is_dir():
        findings.error(
            f"deployment: features.root: {places['features.root']} is not a folder: mount it, or correct the path"
        )
    for key, place in places.items():
        existing = find_existing(place)
        if not existing.is_dir():
            findings.error(
                f"deployment: {key}: {existing} is not a folder, so {place} cannot be created: move it away, or name another"
            )
        elif (reason := _try_to_write(existing)) is not None:
            findings.error(
                f"deployment: {key}: {existing} cannot be written to ({reason}): give this user the right to, or name another"
            )


def _try_to_write(folder: Path) -> str | None:
    """Return why nothing can be created in a folder, by creating a folder: of /proc and the like the mode says nothing."""
    try:
        with tempfile.TemporaryDirectory(prefix=".draftworks-", dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _check_sglang(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that SGLang's environment exists and has SGLang, by its files: the programs start it, which takes seconds."""
    python = Path(os.path.abspath(registry.root / registry.load_deployment().sglang.python))
    backend, serves = target.capture.backend, target.evaluation.serving.prompts > 0
    ours = backend == "sglang" or (backend == "sglang_server" and not target.capture.server.external)
    if (ours or serves) and not python.is_file():
        reason = f"capture.backend {backend}" if ours else "evaluation.serving.prompts"
        findings.error(
            f"target {target.name}: {reason} needs SGLang, and {python} does not exist: make sglang-env, or name its "
            "environment in registry/deployment.yaml: sglang.python"
        )
    elif ours or serves:
        with findings.collect_errors():
            _require_sglang(python, ours)


def _require_sglang(python: Path, captures: bool) -> None:
    """Raise ConfigError if the environment certainly has no SGLang, or one that cannot capture what it has to."""
    version = find_installed_version(python)
    if version == "":
        raise ConfigError(f"{python}, named as sglang.python, has no SGLang: install it there (make sglang-env)")
    if version and captures:
        require_capturing(version, f"{python}, named as sglang.python,")
