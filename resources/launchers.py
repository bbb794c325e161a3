"""Makes the launcher that the deployment configures."""

from __future__ import annotations

from draftworks.config.registry_files import LauncherSpec
from resources.local_launcher import LocalLauncher
from resources.torch_launcher import TorchLauncher


def make_launcher(spec: LauncherSpec) -> TorchLauncher:
    return LocalLauncher(
        grace_s=spec.grace_s, threads=spec.threads, stall_limit_s=spec.stall_limit_s, time_limit_s=spec.time_limit_s
    )
