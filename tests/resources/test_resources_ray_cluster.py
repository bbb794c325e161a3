"""A real Ray cluster of two nodes as a scheduler: jobs of one node and of two, stopped, failed, and with a node lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_run_files import RunFiles
from ray_cluster import ROOT, RayCluster
from waiting import wait_for

from draftworks.config.launchers import RayLauncherSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.draft_io import read_draft_config
from draftworks.errors import LauncherError
from draftworks.programs.failure import RankFailure
from resources.ray_scheduler import RayScheduler
from resources.scheduler import JobRequest, SeenJob
from resources.torch_job import ONE_NODE_ENV, JobState, RunDir, TorchJob

pytestmark = pytest.mark.ray
NAME = "dw-" + 40 * "0"


def make_request(
    folder: Path, task: str = "speak", name: str = NAME, min_nodes: int | None = None, **shape: Any
) -> JobRequest:
    env = {"SECRET": "spoken in confidence", "PYTHONPATH": f"{ROOT / 'tests' / 'toys'}:{ROOT}"}
    job = TorchJob("ray_rank", (task, str(folder)), **shape)
    return JobRequest(name, job, env, RunDir(folder), folder / "job.json", min_nodes)


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
    def look() -> SeenJob | None:
        seen = scheduler.find(NAME)
        if seen is not None and until(seen):
            return seen
        assert seen is None or not seen.state.is_final, seen
        return None

    return wait_for(look)


def has_ended(seen: SeenJob) -> bool:
    return seen.state.is_final


def count_files(folder: Path, pattern: str) -> Callable[[SeenJob], int]:
    return lambda seen: len(list(folder.glob(pattern)))


def find_processes(folder: Path) -> list[str]:
    """Return the command lines of all processes that name the folder."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name != str(os.getpid()))
    return [line.decode(errors="replace") for line in lines if str(folder).encode() in line]


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


def test_ray_runs_a_name_again_that_has_ended(scheduler: RayScheduler, tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        scheduler.create(make_request(folder))
        assert wait(scheduler, has_ended).state is JobState.SUCCEEDED


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


def test_ray_says_why_a_job_waits(cluster: RayCluster, tmp_path: Path) -> None:
    scheduler = RayScheduler(RayLauncherSpec(address=cluster.address, resources={"nowhere": 1}))
    id = scheduler.create(make_request(tmp_path))
    seen = wait(scheduler, lambda seen: bool(seen.reason))
    assert seen.state is JobState.PENDING
    assert "resources" in seen.reason
    assert [each.id for each in scheduler.list()] == [id]
    scheduler.end(id, 1)
    assert scheduler.list() == []


def test_ray_train_runs_the_ranks_of_two_nodes(scheduler: RayScheduler, tmp_path: Path) -> None:
    request = make_request(tmp_path, nodes=2, procs_per_node=2)
    scheduler.create(request)
    assert wait(scheduler, has_ended).state is JobState.SUCCEEDED, request.files.log.read_text()
    assert sorted(path.name for path in tmp_path.glob("began.*")) == [f"began.{rank}.4" for rank in range(4)]
    assert find_processes(tmp_path) == []


def test_a_failing_rank_ends_the_ranks_of_both_nodes(scheduler: RayScheduler, tmp_path: Path) -> None:
    request = make_request(tmp_path, "fail", nodes=2)
    scheduler.create(request)
    seen = wait(scheduler, has_ended)
    assert (seen.state, seen.lost) == (JobState.FAILED, False), request.files.log.read_text()
    assert (
        min(read_failures(request), key=lambda failure: failure.time_ns).message == "ValueError: rank 1 has had enough"
    )
    assert find_processes(tmp_path) == []


def test_ray_ends_two_nodes_after_all_ranks_have_saved(scheduler: RayScheduler, tmp_path: Path) -> None:
    id = scheduler.create(make_request(tmp_path, "save", nodes=2))
    wait(scheduler, lambda seen: count_files(tmp_path, "began.*")(seen) == 2)
    scheduler.end(id, 10)
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]
    assert find_processes(tmp_path) == []


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


def test_a_training_on_two_nodes_ends_with_the_weights_of_two_ranks_on_one(
    scheduler: RayScheduler, tmp_path: Path, tiny_target: TargetFiles
) -> None:
    jobs = {}
    for where, nodes in (("ray", 2), ("here", 1)):
        files = RunFiles.make(tmp_path / where, tiny_target)
        run = files.train_run().save(tmp_path / where / "run.yaml")
        jobs[where] = TorchJob("draftworks.programs.train", (str(run),), nodes=nodes, procs_per_node=2 // nodes)
    (tmp_path / "job").mkdir()
    request = JobRequest(NAME, jobs["ray"], {"PYTHONPATH": str(ROOT)}, RunDir(tmp_path / "job"), tmp_path / "job.json")
    scheduler.create(request)
    here = jobs["here"].build_command()
    subprocess.run(here, env={**os.environ, **ONE_NODE_ENV, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    assert wait(scheduler, has_ended).state is JobState.SUCCEEDED, request.files.log.read_text()
    digests = {read_draft_config(tmp_path / where / "draft").weights_digest for where in jobs}
    assert len(digests) == 1


def test_ray_that_nobody_serves_is_one_error() -> None:
    with pytest.raises(LauncherError, match="no answer from http://127.0.0.1:1 "):
        RayScheduler(RayLauncherSpec(address="http://127.0.0.1:1")).find(NAME)
