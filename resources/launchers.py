"""Makes the launcher of a kind. The modules of a kind are imported when it is chosen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from draftworks.config.launchers import LOCAL, LauncherSpec

if TYPE_CHECKING:
    from resources.torch_launcher import TorchLauncher


def make_launcher(spec: LauncherSpec) -> TorchLauncher:
    """Return the launcher of these settings, for jobs of any program."""
    if spec.kind == LOCAL:
        from resources.local_launcher import LocalLauncher

        return LocalLauncher(
            grace_s=spec.grace_s, threads=spec.threads, stall_limit_s=spec.stall_limit_s, time_limit_s=spec.time_limit_s
        )
    from resources.scheduler_launcher import SchedulerLauncher

    settings = spec.model_dump(mode="json", exclude_unset=True, exclude={"programs"})
    return SchedulerLauncher(settings=json.dumps({**settings, "kind": spec.kind}))
