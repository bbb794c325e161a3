"""Checks of what a registry names and something else has: environment variables, programs, pools. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from draftworks.config.deployment import DeploymentSpec
from draftworks.config.launcher_base import DEFAULT_POOL
from draftworks.config.registry_files import TargetSpec
from draftworks.preflight.findings import Finding, Findings
from draftworks.storage.suggestions import find_close


def check_named_outside(target: TargetSpec, findings: Findings, environment: Mapping[str, str] = os.environ) -> None:
    """Warn of variables and programs that a target's entry names and this machine lacks: another one may have them."""
    where, endpoint = f"target {target.name}", target.responses.endpoint
    hook = None if target.service is None else target.service.hook
    keys = {
        "responses.endpoint.api_key_env": endpoint and endpoint.api_key_env,
        "service.hook.api_key_env": hook and hook.api_key_env,
        **{f"servers.{server.name}.api_key_env": server.api_key_env for server in target.servers},
    }
    for key, name in keys.items():
        if name and name not in environment:
            findings.warning(f"{where}: {key}: the environment has no {name}: set it where runs start")
    command = None if hook is None else hook.command
    if command and shutil.which(command[0], path=environment.get("PATH")) is None:
        found = "no such file" if Path(command[0]).is_absolute() else "it is not on PATH"
        findings.warning(
            f"{where}: service.hook.command: no program {command[0]} here ({found}): correct it, or install it where drafts "
            "are promoted"
        )


def find_deployment_warnings(
    deployment: DeploymentSpec, targets: Iterable[TargetSpec], environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return a warning for each variable of a channel that is not set here, and for pools whose names are nearly equal."""
    found = []
    for number, channel in enumerate(deployment.notifications):
        for key in ("url_env", "api_key_env"):
            name = getattr(channel, key)
            if name and not environment.get(name):
                found.append(
                    f"notifications.{number}.{key}: the environment has no {name}: set it where Dagster's daemon runs"
                )
    found += _list_similar_pools([deployment.launcher.model_dump(), *(target.launcher for target in targets)])
    return [Finding("warning", f"deployment: {text}") for text in found]


def _list_similar_pools(launchers: Iterable[Mapping[str, object]]) -> list[str]:
    """Name pools that differ little from another one: each lets jobs in beside those of the other."""
    known, found = [DEFAULT_POOL], []
    for pool in dict.fromkeys(each.get("pool") for each in launchers):
        if not isinstance(pool, str) or pool in known:
            continue
        close = find_close(pool, known, most=1)
        known.append(pool)
        if close:
            found.append(f"launcher.pool: {pool} is another pool than {close[0]}; did you mean {close[0]}?")
    return found
