"""The launcher of a deployment: each job runs where the settings of its target and program say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from draftworks.config.launchers import COMMON_KEYS, LOCAL, LauncherSpec, parse_launcher
from draftworks.programs.heartbeat import HeartbeatRecord
from resources.job_claims import end_claimed_job
from resources.torch_job import JobStatus, RunDir, TorchJob
from resources.torch_launcher import JobLimits, PreparedFiles, TorchLauncher


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


@dataclass(frozen=True)
class PlacedJob:
    """A job, and the launcher that runs it."""

    launcher: TorchLauncher
    handle: Any


class DeploymentLauncher(TorchLauncher):
    """Runs each job with the launcher that the job names.

    Jobs without one run on this machine: they serve others at an address of it.
    """

    settings: str = Field(
        description="The deployment's launcher as JSON; jobs that name no launcher have its common keys."
    )

    @cached_property
    def _launchers(self) -> dict[str, TorchLauncher]:
        return {}

    def prepare(self, context: dg.AssetExecutionContext, job: TorchJob, folder: Path) -> PreparedFiles:
        """As the launcher of the job; a job that another kind of launcher has left is ended before it runs here."""
        launcher = self._choose(job)
        if job.identity is not None and (job.launcher is None or job.launcher.kind == LOCAL):
            ended = end_claimed_job(job.identity.claim, 10.0 if job.launcher is None else job.launcher.grace_s)
            if ended is not None:
                context.log.info(f"job {ended} of an earlier run made the same: it is ended")
        return launcher.prepare(context, job, folder)

    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> PlacedJob:
        launcher = self._choose(job)
        return PlacedJob(launcher, launcher.submit(job, env, run_dir))

    def poll(self, handle: PlacedJob) -> JobStatus:
        return handle.launcher.poll(handle.handle)

    def cancel(self, handle: PlacedJob) -> None:
        handle.launcher.cancel(handle.handle)

    def describe(self, handle: PlacedJob) -> dict[str, str | int]:
        return handle.launcher.describe(handle.handle)

    def settle(self, handle: PlacedJob) -> None:
        handle.launcher.settle(handle.handle)

    def get_limits(self, handle: PlacedJob) -> JobLimits:
        return handle.launcher.get_limits(handle.handle)

    def locate_files(self, handle: PlacedJob, files: RunDir) -> RunDir:
        return handle.launcher.locate_files(handle.handle, files)

    def ask_for_stacks(self, handle: PlacedJob, ranks: Sequence[HeartbeatRecord]) -> list[str]:
        return handle.launcher.ask_for_stacks(handle.handle, ranks)

    def has_arrays(self, spec: LauncherSpec) -> bool:
        return self._obtain(spec).has_arrays(spec)

    def _choose(self, job: TorchJob) -> TorchLauncher:
        spec = job.launcher
        if spec is None:
            common = {key: value for key, value in json.loads(self.settings).items() if key in COMMON_KEYS}
            spec = parse_launcher({**common, "nodes": 1, "min_nodes": None}, "launcher")
        return self._obtain(spec)

    def _obtain(self, spec: LauncherSpec) -> TorchLauncher:
        """Return the launcher of these settings; it is made once."""
        key = f"{spec.kind} {spec.model_dump_json(exclude={'programs'})}"
        if key not in self._launchers:
            self._launchers[key] = make_launcher(spec)
        return self._launchers[key]


def make_deployment_launcher(spec: LauncherSpec) -> DeploymentLauncher:
    settings = spec.model_dump(mode="json", exclude_unset=True, exclude={"programs"})
    return DeploymentLauncher(settings=json.dumps(settings))
