"""A Ray cluster as a scheduler: what it is asked for and what its words mean; with the marker `ray`, on a real one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_cluster import ROOT, RayCluster

from draftworks.config.ray_launcher import RayLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from draftworks.programs.failure import RankFailure
from draftworks.programs.ray_job import EXIT_LOST, RayJob
from resources.ray_scheduler import RayScheduler
from resources.scheduler import JobRequest, SeenJob
from resources.torch_job import JobState, RunDir, TorchJob

NAME = "dw-" + 40 * "0"
FIRST = f"{NAME}-1"
LONG_S = 240.0


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster.start() as cluster:
        yield cluster


@pytest.fixture
def scheduler(cluster: RayCluster) -> Iterator[RayScheduler]:
    scheduler = RayScheduler(RayLauncherSpec(address=cluster.address, grace_s=10, cpus_per_rank=0.5))
    yield scheduler
    assert scheduler.list() == []


def wait(scheduler: RayScheduler, until: Callable[[SeenJob], bool]) -> SeenJob:
    deadline = time.monotonic() + LONG_S
    while (seen := scheduler.find(NAME)) is None or not until(seen):
        assert time.monotonic() < deadline, seen
        assert seen is None or not seen.state.is_final, seen
        time.sleep(0.2)
    return seen


def has_ended(seen: SeenJob) -> bool:
    return seen.state.is_final


def count_files(folder: Path, pattern: str) -> Callable[[SeenJob], int]:
    return lambda seen: len(list(folder.glob(pattern)))


def find_processes(folder: Path) -> list[str]:
    """Return the command lines of all processes that name the folder."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name != str(os.getpid()))
    return [line.decode(errors="replace") for line in lines if str(folder).encode() in line]


@pytest.mark.ray
def test_ray_runs_a_job_of_one_node_once(
    scheduler: RayScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(tmp_path, procs_per_node=2)
    assert scheduler.find(NAME) is None
    id = scheduler.create(request)
    found = scheduler.find(NAME)
    assert found is not None
    assert (found.id, found.claim) == (id, request.claim)
    monkeypatch.setattr(scheduler, "_list_ids", lambda name: [])
    with pytest.raises(LauncherError, match="already exists"):
        scheduler.create(request)
    monkeypatch.undo()
    assert wait(scheduler, has_ended).state is JobState.SUCCEEDED
    log = request.files.log.read_text()
    assert "rank 0 of 2, spoken in confidence" in log
    assert "rank 1 of 2, spoken in confidence" in log
    assert find_processes(tmp_path) == []


@pytest.mark.ray
def test_ray_runs_a_name_again_that_has_ended(scheduler: RayScheduler, tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        scheduler.create(make_request(folder))
        assert wait(scheduler, has_ended).state is JobState.SUCCEEDED


@pytest.mark.ray
def test_ray_fails_a_job_whose_rank_fails(scheduler: RayScheduler, tmp_path: Path) -> None:
    request = make_request(tmp_path, "fail", procs_per_node=2)
    scheduler.create(request)
    seen = wait(scheduler, has_ended)
    assert (seen.state, seen.lost) == (JobState.FAILED, False)
    assert "exit code 1" in seen.reason
    assert "ValueError: rank 1 has had enough" in {failure.message for failure in read_failures(request)}


def read_failures(request: JobRequest) -> list[RankFailure]:
    found = [RankFailure.read(path) for path in request.files.ranks.rglob("error.json")]
    return [failure for failure in found if failure is not None]


@pytest.mark.ray
def test_ray_ends_a_job_after_its_ranks_have_saved(scheduler: RayScheduler, tmp_path: Path) -> None:
    id = scheduler.create(make_request(tmp_path, "save", procs_per_node=2))
    wait(scheduler, lambda seen: count_files(tmp_path, "began.*")(seen) == 2)
    scheduler.end(id, 10)
    seen = scheduler.look(id)
    assert seen is not None
    assert seen.state is JobState.CANCELLED
    assert len(list(tmp_path.glob("saved.*"))) == 2
    assert find_processes(tmp_path) == []
    scheduler.end(id, 10)


@pytest.mark.ray
def test_ray_says_why_a_job_waits(cluster: RayCluster, tmp_path: Path) -> None:
    scheduler = RayScheduler(RayLauncherSpec(address=cluster.address, resources={"nowhere": 1}))
    id = scheduler.create(make_request(tmp_path))
    seen = wait(scheduler, lambda seen: bool(seen.reason))
    assert seen.state is JobState.PENDING
    assert "resources" in seen.reason
    assert [each.id for each in scheduler.list()] == [id]
    scheduler.end(id, 1)
    assert scheduler.list() == []


@pytest.mark.ray
def test_ray_train_runs_the_ranks_of_two_nodes(scheduler: RayScheduler, tmp_path: Path) -> None:
    request = make_request(tmp_path, nodes=2, procs_per_node=2)
    scheduler.create(request)
    assert wait(scheduler, has_ended).state is JobState.SUCCEEDED, request.files.log.read_text()
    assert sorted(path.name for path in tmp_path.glob("began.*")) == [f"began.{rank}.4" for rank in range(4)]
    assert find_processes(tmp_path) == []


@pytest.mark.ray
def test_a_failing_rank_ends_the_ranks_of_both_nodes(scheduler: RayScheduler, tmp_path: Path) -> None:
    request = make_request(tmp_path, "fail", nodes=2)
    scheduler.create(request)
    seen = wait(scheduler, has_ended)
    assert (seen.state, seen.lost) == (JobState.FAILED, False), request.files.log.read_text()
    assert (
        min(read_failures(request), key=lambda failure: failure.time_ns).message == "ValueError: rank 1 has had enough"
    )
    assert find_processes(tmp_path) == []


@pytest.mark.ray
def test_ray_ends_two_nodes_after_all_ranks_have_saved(scheduler: RayScheduler, tmp_path: Path) -> None:
    id = scheduler.create(make_request(tmp_path, "save", nodes=2))
    wait(scheduler, lambda seen: count_files(tmp_path, "began.*")(seen) == 2)
    scheduler.end(id, 10)
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]
    assert find_processes(tmp_path) == []


@pytest.mark.ray
def test_a_lost_node_is_told_apart_and_the_next_submission_goes_on_without(
    cluster: RayCluster, scheduler: RayScheduler, tmp_path: Path
) -> None:
    scheduler.create(make_request(tmp_path, "save", nodes=2))
    wait(scheduler, lambda seen: count_files(tmp_path, "began.*.2")(seen) == 2)
    cluster.kill_second_node()
    try:
        seen = wait(scheduler, has_ended)
        assert seen.state is JobState.FAILED
        again = tmp_path / "again"
        again.mkdir()
        scheduler.create(make_request(again, nodes=2, min_nodes=1))
        assert wait(scheduler, has_ended).state is JobState.SUCCEEDED, (again / "out.log").read_text()
        assert [path.name for path in again.glob("began.*")] == ["began.0.1"]
    finally:
        cluster.add_second_node()


@pytest.mark.ray
def test_ray_that_nobody_serves_is_one_error() -> None:
    with pytest.raises(LauncherError, match="no answer from http://127.0.0.1:1 "):
        RayScheduler(RayLauncherSpec(address="http://127.0.0.1:1")).find(NAME)
