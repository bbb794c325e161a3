"""A launcher without torchrun and without the imports: its ranks are forked off a process that has them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import psutil
from forked_ranks import ForkedRanks

from draftworks.config.launchers import LauncherSpec
from resources.launchers import make_launcher
from resources.local_launcher import LocalJob, LocalLauncher
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob

_FAILED = 1
"""torchrun's own exit code when a rank fails."""


class ForkingLauncher(LocalLauncher):
    """Gives each rank the environment that torchrun gives it, and ends a job as torchrun does.

    Jobs of an interpreter of their own, and programs named in `torchrun`, are the real launcher's. Those that a test
    interrupts, kills or lets stand still have to be.
    """

    poll_interval_s: float = 0.02
    torchrun: list[str] = []

    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> LocalJob | ForkedRanks:
        if job.python is not None or job.module.rpartition(".")[2] in self.torchrun:
            return super().submit(job, env, run_dir)
        return ForkedRanks.start(job.module, job.args, job.procs_per_node, run_dir.ranks, run_dir.log, env)

    def poll(self, handle: LocalJob | ForkedRanks) -> JobStatus:
        """As torchrun: the first rank that fails ends the others."""
        if isinstance(handle, LocalJob):
            return super().poll(handle)
        running = handle.look()
        if any(handle.codes.values()):
            self.cancel(handle)
            return JobStatus(JobState.FAILED, _FAILED)
        return JobStatus(JobState.RUNNING) if running else JobStatus(JobState.SUCCEEDED, 0)

    def cancel(self, handle: LocalJob | ForkedRanks) -> None:
        if isinstance(handle, LocalJob):
            return super().cancel(handle)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            deadline = time.monotonic() + self.grace_s
            for pid in handle.look():
                end(psutil.Process(pid))
            while handle.look() and time.monotonic() < deadline:
                time.sleep(self.poll_interval_s)

    def describe(self, handle: LocalJob | ForkedRanks) -> dict[str, str | int]:
        if isinstance(handle, LocalJob):
            return super().describe(handle)
        return {"engine": "local", "pid": next(iter(handle.codes))}


def make_forking_launcher(spec: LauncherSpec, torchrun: Sequence[str] = ()) -> ForkingLauncher:
    """The launcher of a deployment, in place of `resources.deployment_launcher.make_deployment_launcher`."""
    settings = make_launcher(spec).model_dump(exclude={"poll_interval_s"})
    return ForkingLauncher(**settings, torchrun=list(torchrun))
