"""A Ray cluster as a scheduler: jobs by Ray's own job client, found by their submission ids.

A submission id is the job's name and the number of the submission. Ray takes an id once and refuses it to a second one that
comes at the same time; the id of a job that has ended cannot be used again, as the name of its supervisor stays taken.

dagster-ray's client is not used: it waits for its job inside a Dagster step, reads messages from the job's log, and knows
no job that another process submitted. Here a job is found by its name, and its messages travel through files.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftworks.config.launchers import RayLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from draftworks.programs.ray_job import EXIT_LOST, NODE_OPTIONS, STOP_FILE, STOPPED, RayJob
from resources.scheduler import NAME_PREFIX, JobRequest, Scheduler, SeenJob
from resources.torch_job import ONE_NODE_ENV, JobState, TorchJob

CLAIM, FOLDER = "draftworks_claim", "draftworks_folder"
"""Keys of paths in the job's metadata: of its claim, and of the folder with its stop file."""
_STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.CANCELLED,
}
_LOST = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}
"""Errors by which Ray says that a job ended with its node, or that no node took it."""
_STOP_MARGIN_S = 30.0
"""Beyond the grace, until Ray kills what has not ended: a driver of several nodes waits for all of them."""
_END_MARGIN_S = 30.0
_TORCHRUN_SHARE_OF_GRACE = 0.7
"""torchrun itself kills a stuck rank after this share, so that torchrun can still exit in order."""
_POLL_S = 0.2
_REASON_CHARS = 2000


class RayScheduler(Scheduler):
    """Submits jobs to the cluster behind the dashboard at `spec.address`."""

    engine = "ray"

    def __init__(self, spec: RayLauncherSpec) -> None:
        self._spec = spec

    def create(self, request: JobRequest) -> str:
        """Submit the job under the next id of its name: of two that submit at a time, one is refused."""
        folder = request.files.error.parent
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "ray_job.json"
        job = self._make_job(request, folder)
        job.save(file)
        environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self._spec.grace_s + _STOP_MARGIN_S))}
        command = [self._spec.python or sys.executable, "-m", "draftworks.programs.ray_job", str(file)]
        root = Path(__file__).parents[1]
        with self._words():
            number = max((_parse_number(each) for each in self._list_ids(request.name)), default=0) + 1
            return self._client.submit_job(
                entrypoint=f"cd {shlex.quote(str(root))} && exec {shlex.join(command)}",
                submission_id=f"{request.name}-{number}",
                runtime_env={"env_vars": environment},
                metadata={CLAIM: str(request.claim), FOLDER: str(folder)},
                **(_as_entrypoint(job.resources) if job.nodes == 1 else {"entrypoint_num_cpus": 0}),
            )

    def find(self, name: str) -> SeenJob | None:
        with self._words():
            ids = sorted(self._list_ids(name), key=_parse_number)
        seen = [each for each in map(self.look, ids) if each is not None]
        return next((each for each in seen if not each.state.is_final), seen[-1] if seen else None)

    def look(self, id: str) -> SeenJob | None:
        with self._words():
            try:
                return _describe(self._client.get_job_info(id))
            except RuntimeError as error:
                if "status code 404" in str(error):
                    return None
                raise

    def end(self, id: str, grace_s: float) -> None:
        """Stop a job. The grace that counts is that of the submission: Ray reads it when the job starts.

        Ray stops no job that waits for a place: such a job finds its stop file when it gets one, and ends at once.
        """
        seen = self.look(id)
        if seen is None or seen.state.is_final:
            return
        with self._words():
            if seen.state is JobState.PENDING:
                folder = self._client.get_job_info(id).metadata[FOLDER]
                Path(folder, STOP_FILE).write_text(STOPPED)
            self._client.stop_job(id)
        deadline = time.monotonic() + max(grace_s, self._spec.grace_s) + _STOP_MARGIN_S + _END_MARGIN_S
        while (seen := self.look(id)) is not None and not seen.state.is_final:
            if time.monotonic() > deadline:
                raise LauncherError(f"Ray job {id} was stopped and has not ended: {seen.reason or seen.state.value}")
            time.sleep(_POLL_S)

    def list(self) -> list[SeenJob]:
        with self._words():
            found = [each for each in self._client.list_jobs() if _is_ours(each)]
        return [seen for seen in map(_describe, found) if not seen.state.is_final]

    def _list_ids(self, name: str) -> Sequence[str]:
        jobs = self._client.list_jobs()
        return [each.submission_id for each in jobs if _is_ours(each) and _parse_name(each.submission_id) == name]

    def _make_job(self, request: JobRequest, folder: Path) -> RayJob:
        job, spec = request.job, self._spec
        python = job.python or (None if spec.python is None else Path(spec.python))
        options = () if job.nodes == 1 else (*NODE_OPTIONS, f"--rdzv-id={request.name}")
        command = replace(job, python=python).build_command(*options, f"--log-dir={request.files.ranks}")
        own = {
            **(ONE_NODE_ENV if job.nodes == 1 else {}),
            "OMP_NUM_THREADS": str(spec.threads),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(spec.grace_s * _TORCHRUN_SHARE_OF_GRACE)),
        }
        return RayJob(
            command=tuple(command),
            env={**own, **job.env, **request.env},
            folder=str(folder),
            log=str(request.files.log),
            cwd=os.getcwd(),
            nodes=job.nodes,
            least_nodes=job.nodes if request.min_nodes is None else request.min_nodes,
            resources=self._count_resources(job),
            grace_s=spec.grace_s,
            start_timeout_s=spec.start_timeout_s,
            time_limit_s=spec.time_limit_s,
        )

    def _count_resources(self, job: TorchJob) -> dict[str, float]:
        counted = {"CPU": self._spec.cpus_per_rank * job.procs_per_node, "GPU": float(job.gpus_per_node)}
        if self._spec.memory_gb is not None:
            counted["memory"] = self._spec.memory_gb * 1e9
        return {name: value for name, value in {**counted, **self._spec.resources}.items() if value}

    @cached_property
    def _client(self) -> Any:
        """Ray's client. Raises ConfigError if Ray is not installed, LauncherError if nobody answers."""
        try:
            from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"launcher ray: Ray's client cannot be imported ({error}). Install it: pip install -e '.[ray]'"
            ) from error
        return JobSubmissionClient(self._spec.address)

    @contextmanager
    def _words(self) -> Iterator[None]:
        """Raise errors of the client as LauncherError, with Ray's own words."""
        try:
            yield
        except (LauncherError, ConfigError):
            raise
        except ConnectionError as error:
            raise LauncherError(
                f"launcher ray: no answer from {self._spec.address} ({error}). Expected the address of Ray's dashboard,"
                " such as http://head:8265; `ray status` on the cluster says whether it runs"
            ) from error
        except Exception as error:
            raise LauncherError(f"launcher ray: {self._spec.address} says: {_read_last_line(error)}") from error


def make_scheduler(spec: RayLauncherSpec) -> RayScheduler:
    return RayScheduler(spec)


def _read_last_line(error: Exception) -> str:
    """Return the last line of Ray's answer, which may be the traceback of its server."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .\n")]
    return lines[-1] if lines else type(error).__name__


def _is_ours(details: Any) -> bool:
    return re.fullmatch(rf"{NAME_PREFIX}[0-9a-f]+-[0-9]+", details.submission_id or "") is not None


def _parse_name(id: str) -> str:
    return id.rpartition("-")[0]


def _parse_number(id: str) -> int:
    return int(id.rpartition("-")[2])


def _as_entrypoint(resources: dict[str, float] | Any) -> dict[str, Any]:
    """Return resources of one node as arguments of `submit_job`."""
    custom = {name: value for name, value in resources.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "entrypoint_num_cpus": resources.get("CPU", 0),
        "entrypoint_num_gpus": resources.get("GPU", 0),
        "entrypoint_memory": round(resources.get("memory", 0)),
        "entrypoint_resources": custom,
    }


def _describe(details: Any) -> SeenJob:
    state = _STATES[str(getattr(details.status, "value", details.status))]
    metadata = details.metadata or {}
    claim, folder = metadata.get(CLAIM), metadata.get(FOLDER)
    if state is JobState.PENDING and folder is not None and Path(folder, STOP_FILE).exists():
        state = JobState.CANCELLED
    error = str(getattr(details.error_type, "value", details.error_type) or "")
    says = "" if state in (JobState.RUNNING, JobState.SUCCEEDED) else (details.message or "")
    return SeenJob(
        id=details.submission_id,
        name=_parse_name(details.submission_id),
        state=state,
        reason=says[-_REASON_CHARS:],
        lost=state is JobState.FAILED and (error in _LOST or details.driver_exit_code == EXIT_LOST),
        claim=None if claim is None else Path(claim),
    )
