"""A Ray cluster as a scheduler: what it is asked for, and what its words mean."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_cluster import ROOT

from draftworks.config.launchers import RayLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from draftworks.programs.ray_job import EXIT_LOST, RayJob
from resources.ray_scheduler import RayScheduler
from resources.scheduler import JobRequest, SeenJob
from resources.torch_job import JobState, RunDir, TorchJob

NAME = "dw-" + 40 * "0"
FIRST = f"{NAME}-1"


def make_request(
    folder: Path, task: str = "speak", name: str = NAME, min_nodes: int | None = None, **shape: Any
) -> JobRequest:
    env = {"SECRET": "spoken in confidence", "PYTHONPATH": f"{ROOT / 'tests' / 'toys'}:{ROOT}"}
    job = TorchJob("ray_rank", (task, str(folder)), **shape)
    return JobRequest(name, job, env, RunDir(folder), folder / "job.json", min_nodes)


class FakeClient:
    """Knows some jobs, or raises an error; keeps what it is asked to submit."""

    def __init__(self, *jobs: Any, error: Exception | None = None) -> None:
        self.jobs, self.error = list(jobs), error
        self.submitted: dict[str, Any] = {}
        self.stopped: list[str] = []

    def stop_job(self, id: str) -> None:
        self.stopped.append(id)

    def submit_job(self, **arguments: Any) -> str:
        self.submitted = arguments
        return arguments["submission_id"]

    def get_job_info(self, id: str) -> Any:
        self._answer()
        for each in self.jobs:
            if each.submission_id == id:
                return each
        raise RuntimeError(f"Request failed with status code 404: {id} does not exist")

    def list_jobs(self) -> list[Any]:
        self._answer()
        return self.jobs

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


def make_details(status: str, **changes: Any) -> Any:
    values = {"message": None, "error_type": None, "metadata": {}, "driver_exit_code": None, "submission_id": FIRST}
    return SimpleNamespace(**{"status": status, **values, **changes})


def make_scheduler(client: FakeClient, **settings: Any) -> RayScheduler:
    scheduler = RayScheduler(RayLauncherSpec(**settings))
    scheduler.__dict__["_client"] = client
    return scheduler


def test_secrets_are_in_a_file_of_the_user_and_not_in_what_ray_shows(tmp_path: Path) -> None:
    client = FakeClient()
    assert make_scheduler(client, grace_s=20).create(make_request(tmp_path)) == FIRST
    assert "confidence" not in repr(client.submitted)
    assert client.submitted["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "50"}}
    assert client.submitted["metadata"] == {
        "draftworks_claim": str(tmp_path / "job.json"),
        "draftworks_folder": str(tmp_path),
    }
    job = RayJob.load(tmp_path / "ray_job.json")
    assert job.env["SECRET"] == "spoken in confidence"
    assert job.log == str(tmp_path / "out.log")


def test_a_job_takes_the_resources_of_its_ranks(tmp_path: Path) -> None:
    client = FakeClient()
    scheduler = make_scheduler(client, cpus_per_rank=4, memory_gb=2, resources={"fast": 1}, python="/shared/bin/python")
    scheduler.create(make_request(tmp_path, procs_per_node=2, gpus_per_node=2))
    assert client.submitted["entrypoint_num_cpus"] == 8
    assert client.submitted["entrypoint_num_gpus"] == 2
    assert client.submitted["entrypoint_memory"] == 2_000_000_000
    assert client.submitted["entrypoint_resources"] == {"fast": 1}
    assert "exec /shared/bin/python -m draftworks.programs.ray_job" in client.submitted["entrypoint"]
    scheduler.create(make_request(tmp_path, procs_per_node=2, nodes=3, min_nodes=1))
    assert client.submitted["entrypoint_num_cpus"] == 0, "the driver of several nodes only waits"
    job = RayJob.load(tmp_path / "ray_job.json")
    assert (job.nodes, job.least_nodes, job.resources) == (3, 1, {"CPU": 8.0, "memory": 2e9, "fast": 1.0})
    assert "--nnodes=@NODES@" in job.command


def test_a_submission_has_the_next_number_of_its_name(tmp_path: Path) -> None:
    ended = [make_details("FAILED", submission_id=f"{NAME}-{number}") for number in (2, 10, 9)]
    others = [make_details("FAILED", submission_id=each) for each in (f"dw-{40 * '1'}-12", f"{NAME}-x", None)]
    scheduler = make_scheduler(FakeClient(*ended, *others))
    assert scheduler.create(make_request(tmp_path)) == f"{NAME}-11"
    found = scheduler.find(NAME)
    assert found is not None
    assert (found.id, found.name) == (f"{NAME}-10", NAME)


def test_a_job_that_waits_is_ended_by_a_file_which_it_finds_later(tmp_path: Path) -> None:
    client = FakeClient(make_details("PENDING", metadata={"draftworks_folder": str(tmp_path)}))
    scheduler = make_scheduler(client)
    assert [each.id for each in scheduler.list()] == [FIRST]
    scheduler.end(FIRST, 1)
    assert client.stopped == [FIRST]
    assert scheduler.list() == []
    seen = scheduler.look(FIRST)
    assert seen is not None
    assert (seen.state, seen.lost) == (JobState.CANCELLED, False)


def test_the_living_job_of_a_name_is_found_before_newer_ones() -> None:
    jobs = [make_details("FAILED", submission_id=f"{NAME}-2"), make_details("RUNNING")]
    found = make_scheduler(FakeClient(*jobs)).find(NAME)
    assert found is not None
    assert found.id == FIRST


@pytest.mark.parametrize(
    ("details", "state", "lost"),
    [
        (make_details("PENDING", message="waiting for resources"), JobState.PENDING, False),
        (make_details("RUNNING", message="Job is currently running."), JobState.RUNNING, False),
        (make_details("SUCCEEDED"), JobState.SUCCEEDED, False),
        (make_details("STOPPED", message="stopped"), JobState.CANCELLED, False),
        (make_details("FAILED", message="exit code 1", driver_exit_code=1), JobState.FAILED, False),
        (make_details("FAILED", message="a node", driver_exit_code=EXIT_LOST), JobState.FAILED, True),
        (make_details("FAILED", message="died", error_type="JOB_SUPERVISOR_ACTOR_DIED"), JobState.FAILED, True),
        (
            make_details("FAILED", message="late", error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT"),
            JobState.FAILED,
            True,
        ),
    ],
    ids=["pending", "running", "succeeded", "stopped", "failed", "node lost", "driver's node lost", "never started"],
)
def test_a_job_is_what_ray_says(details: Any, state: JobState, lost: bool) -> None:
    seen = make_scheduler(FakeClient(details)).look(FIRST)
    reason = "" if state in (JobState.RUNNING, JobState.SUCCEEDED) else details.message
    assert seen == SeenJob(FIRST, NAME, state, reason, lost, None)


def test_only_living_jobs_of_draftworks_are_listed() -> None:
    ours = make_details("PENDING", metadata={"draftworks_claim": "/var/job.json"})
    others = [make_details("RUNNING", submission_id=each) for each in ("raysubmit_another", "dw-mine-1", None)]
    listed = make_scheduler(FakeClient(ours, *others, make_details("FAILED", submission_id=f"{NAME}-2"))).list()
    assert listed == [SeenJob(FIRST, NAME, JobState.PENDING, "", False, Path("/var/job.json"))]


def test_an_unknown_job_is_none_and_other_errors_have_ray_s_last_words() -> None:
    assert make_scheduler(FakeClient()).find(NAME) is None
    assert make_scheduler(FakeClient()).look(FIRST) is None
    trace = RuntimeError("Request failed with status code 500: Traceback\n  File\nValueError: it is full\n.")
    with pytest.raises(LauncherError, match=r"^launcher ray: http://127.0.0.1:8265 says: ValueError: it is full$"):
        make_scheduler(FakeClient(error=trace)).look(FIRST)
    with pytest.raises(LauncherError, match="no answer from http://127.0.0.1:8265 .*Ray's dashboard"):
        make_scheduler(FakeClient(error=ConnectionError("refused"))).find(NAME)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[ray\]'"):
        RayScheduler(RayLauncherSpec()).find(NAME)
