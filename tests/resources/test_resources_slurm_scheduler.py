"""Jobs in a real Slurm of two nodes, by the scheduler alone: what is submitted, seen, ended and refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from coverings import gate_or_long
from slurm_cluster import SlurmCluster
from waiting import wait_until

from draftworks.config.launchers import SlurmLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from draftworks.programs.failure import RankFailure
from resources.scheduler import JobRequest, SeenJob
from resources.slurm_commands import SlurmCommands
from resources.slurm_scheduler import SlurmQueue, SlurmScheduler
from resources.torch_job import JobState, RunDir, TorchJob

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RANKS = 2
GRACE_S = 60.0
PROGRAMS = str(Path(__file__).parents[1] / "programs")


@pytest.fixture
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    yield slurm
    slurm.empty()


def make_scheduler(cluster: SlurmCluster, **settings) -> SlurmScheduler:
    return SlurmScheduler(SlurmLauncherSpec(**{"grace_s": GRACE_S, "commands": str(cluster.commands), **settings}))


def make_request(folder: Path, task: str, nodes: int = 1, procs: int | None = None, **more) -> JobRequest:
    """A job of two ranks, on one node or on two: each rank costs seconds to import what it needs."""
    procs = procs or RANKS // nodes
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"out": ".", "task": task, "ranks": nodes * procs}))
    files = RunDir.create(folder / "runs", "0123456789", 0)
    env = {"PYTHONPATH": PROGRAMS, "TORCHELASTIC_ERROR_FILE": str(files.error), "PYTHONUNBUFFERED": "1"}
    job = TorchJob("frame_program", (str(file),), nodes=nodes, procs_per_node=procs)
    return JobRequest("dw-0123456789abcdef", job, env, files, folder / "job.json", **more)


def wait_for_ranks(scheduler: SlurmScheduler, id: str, request: JobRequest, count: int) -> None:
    """Wait until so many ranks have said that they are ready; fail at once if the job ends before."""

    def are_ready() -> bool:
        seen = scheduler.look(id)
        assert seen is not None
        assert not seen.state.is_final, f"{seen}\n{request.files.log.read_text()}"
        return len(list(request.claim.parent.glob("ready-*"))) == count

    wait_until(are_ready)


def wait_for_end(scheduler: SlurmScheduler, id: str) -> SeenJob:
    seen: list[SeenJob] = []

    def has_ended() -> bool:
        found = scheduler.look(id)
        assert found is not None
        seen.append(found)
        return found.state.is_final

    wait_until(has_ended)
    return seen[-1]


def read_failures(request: JobRequest) -> list[RankFailure]:
    found = [RankFailure.read(path) for path in request.files.ranks.rglob("error.json")]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("nodes", gate_or_long([1, 2], [2]))
def test_ranks_of_all_nodes_work_together(nodes: int, tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster), make_request(tmp_path, "sum", nodes)
    id = scheduler.create(request)
    ended = wait_for_end(scheduler, id)
    log = request.files.log.read_text()
    assert ended.state is JobState.SUCCEEDED, log
    assert (ended.name, ended.claim) == (request.name, request.claim)
    assert f'"sum": {sum(range(RANKS))}' in log
    assert scheduler.find(request.name) == ended
    assert scheduler.list() == []


@pytest.mark.parametrize("nodes", gate_or_long([1, 2], [2]))
def test_a_failing_rank_ends_the_job_with_its_own_message(nodes: int, tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster, grace_s=3), make_request(tmp_path, "crash", nodes)
    ended = wait_for_end(scheduler, scheduler.create(request))
    assert (ended.state, ended.lost) == (JobState.FAILED, False), request.files.log.read_text()
    first = min(read_failures(request), key=lambda failure: failure.time_ns)
    assert first.message == "RuntimeError: a ghost in the machine"
    assert first.rank == RANKS - 1


@pytest.mark.parametrize(("by", "nodes"), gate_or_long(product(["us", "scancel"], [1, 2]), [("scancel", 2)]))
def test_a_cancelled_job_saves_first(nodes: int, by: str, tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster), make_request(tmp_path, "wait", nodes)
    id = scheduler.create(request)
    wait_for_ranks(scheduler, id, request, RANKS)
    if by == "us":
        scheduler.end(id, GRACE_S)
    else:
        cluster.ask("scancel", id)
    ended = wait_for_end(scheduler, id)
    assert ended.state in (JobState.FAILED, JobState.CANCELLED)
    assert len(list(tmp_path.glob("saved-*"))) == RANKS, request.files.log.read_text()
    assert all(failure.interrupted for failure in read_failures(request))
    assert scheduler.list() == []
    scheduler.end(id, GRACE_S)  # once more does nothing


def test_a_stuck_rank_is_killed_after_the_grace(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster, grace_s=2), make_request(tmp_path, "stuck", nodes=2)
    id = scheduler.create(request)
    wait_for_ranks(scheduler, id, request, RANKS)
    scheduler.end(id, 2)
    assert wait_for_end(scheduler, id).state.is_final
    assert cluster.nodes_are("idle")


def test_a_lost_node_is_told_and_the_next_job_begins_without_it(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster, grace_s=3), make_request(tmp_path / "first", "wait", nodes=2)
    id = scheduler.create(request)
    wait_for_ranks(scheduler, id, request, RANKS)
    try:
        cluster.lose_node("n2")
        ended = wait_for_end(scheduler, id)
        assert (ended.state, ended.lost) == (JobState.FAILED, True), request.files.log.read_text()
        again = make_request(tmp_path / "second", "sum", nodes=2, min_nodes=1)
        assert wait_for_end(scheduler, scheduler.create(again)).state is JobState.SUCCEEDED, again.files.log.read_text()
        assert '"ranks": 1' in again.files.log.read_text()
    finally:
        cluster.start_node("n2")


@pytest.mark.long
def test_preemption_lets_a_job_save(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster, cpus_per_node=8), make_request(tmp_path, "wait", nodes=2)
    id = scheduler.create(request)
    wait_for_ranks(scheduler, id, request, RANKS)
    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    ended = wait_for_end(scheduler, id)
    assert ended.state in (JobState.FAILED, JobState.CANCELLED)
    assert all(failure.interrupted for failure in read_failures(request))
    assert len(list(tmp_path.glob("saved-*"))) == RANKS
    wait_until(lambda: cluster.ask("squeue", "--noheader", f"--jobs={urgent}", "--states=COMPLETED"))


def test_refusals_are_told_in_slurms_words(tmp_path: Path, cluster: SlurmCluster) -> None:
    for settings, words in (
        ({"partition": "nowhere"}, "invalid partition specified: nowhere"),
        ({"partition": "short", "time_limit_s": 6000}, "Requested time limit is invalid"),
        ({"sbatch": ["--no-such-option"]}, "unrecognized option '--no-such-option'"),
        ({"memory": "900G"}, "Memory specification can not be satisfied"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)Slurm refuses the job: .*{words}.*job\.sh"):
            make_scheduler(cluster, **settings).create(make_request(tmp_path, "sum"))
        if "memory" in settings:  # a test run says of too much of it what it says of drained nodes
            continue
        with pytest.raises(ConfigError, match=rf"(?s)Slurm would refuse the job: .*{words}"):
            make_scheduler(cluster, **settings).check(make_request(tmp_path, "sum"))
    request = make_request(tmp_path, "sum", nodes=2)
    for copies in (1, 3):
        make_scheduler(cluster).check(replace(request, job=replace(request.job, copies=copies)))
    assert cluster.ask("squeue", "--noheader") == ""
    with pytest.raises(ConfigError, match="is over before anything is done"):
        make_scheduler(cluster, time_limit_s=60, grace_s=60).create(make_request(tmp_path, "sum"))
    with pytest.raises(ConfigError, match="no command sbatch in /nowhere"):
        make_scheduler(cluster, commands="/nowhere").create(make_request(tmp_path, "sum"))


def test_a_job_that_would_wait_for_ever_is_a_failure(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler = make_scheduler(cluster, cpus_per_node=8)
    cluster.ask("scontrol", "update", "partition=short", "state=down")
    try:
        id = make_scheduler(cluster, partition="short").create(make_request(tmp_path, "sum"))
        make_scheduler(cluster, partition="short").check(make_request(tmp_path, "sum"))
        waiting = scheduler.look(id)
        assert waiting is not None
        assert waiting.state is JobState.PENDING
        wait_until(lambda: (seen := scheduler.look(id)) is not None and seen.reason == "PartitionDown")
        scheduler.end(id, GRACE_S)
        assert scheduler.look(id).state is JobState.CANCELLED
    finally:
        cluster.ask("scontrol", "update", "partition=short", "state=up")


def test_a_folder_that_nodes_do_not_see_is_named(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster, partition="short"), make_request(tmp_path, "sum")
    cluster.ask("scontrol", "update", "partition=short", "state=down")
    try:
        id = scheduler.create(request)
        request.files.path.rename(tmp_path / "elsewhere")
    finally:
        cluster.ask("scontrol", "update", "partition=short", "state=up")
    ended = wait_for_end(scheduler, id)
    assert ended.state is JobState.FAILED
    assert ended.reason.startswith(f"no node has written into {request.files.path}: does every node see this folder")


def test_an_unreachable_controller_is_an_error_and_jobs_go_on(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster), make_request(tmp_path, "sum", procs=1)
    id = scheduler.create(request)
    cluster.stop_controller()
    try:
        again = make_request(tmp_path, "sum")
        with ThreadPoolExecutor() as pool:  # each tries for seconds
            asked = [pool.submit(lambda: make_scheduler(cluster).create(again)), pool.submit(scheduler.list)]
        for each in asked:
            with pytest.raises(LauncherError, match=r"(?i)Slurm: .*unable to contact slurm controller"):
                each.result()
    finally:
        cluster.start()
    assert wait_for_end(scheduler, id).state is JobState.SUCCEEDED


def test_a_process_asks_about_all_its_jobs_at_once(cluster: SlurmCluster) -> None:
    now = [0.0]
    queue = SlurmQueue(SlurmCommands(str(cluster.commands)), interval_s=2.0, clock=lambda: now[0])
    for _ in range(20):
        assert queue.find("99017") is queue.find("99018") is None
    assert queue.questions == 1
    queue.find("99017", submitted_at=0.0)  # submitted since
    now[0] = 1.9
    queue.find("99017")
    assert queue.questions == 2
    now[0] = 4.0
    queue.find("99017")
    assert queue.questions == 3


def test_what_a_job_is_given_is_in_no_file_of_it(tmp_path: Path, cluster: SlurmCluster) -> None:
    request = make_request(tmp_path, "sum", procs=1)
    scheduler = make_scheduler(cluster, setup=["export SECRET_SEEN=${SECRET:+yes}", "echo seen: $SECRET_SEEN"])
    id = scheduler.create(JobRequest(**{**vars(request), "env": {**request.env, "SECRET": "hush-4711"}}))
    assert wait_for_end(scheduler, id).state is JobState.SUCCEEDED
    assert "seen: yes" in request.files.log.read_text()
    found = [path for path in tmp_path.rglob("*") if path.is_file() and b"hush-4711" in path.read_bytes()]
    assert not found, os.fspath(found[0])


def test_copies_are_one_array_of_which_a_dead_one_starts_again(tmp_path: Path, cluster: SlurmCluster) -> None:
    scheduler, request = make_scheduler(cluster), make_request(tmp_path, "wait", procs=1)
    request = replace(request, job=replace(request.job, copies=3))
    id = scheduler.create(request)

    def count_starts(copy: int) -> int:
        log = request.files.of_copy(copy).log
        return log.read_text().count("task wait") if log.exists() else 0

    def list_dead() -> tuple[int, ...]:
        seen = scheduler.look(id)
        assert seen is not None
        assert not seen.state.is_final
        return tuple(each.number for each in seen.dead)

    wait_until(lambda: all(count_starts(copy) == 1 for copy in range(3)))
    assert [(each.id, each.claim) for each in scheduler.list()] == [(id, request.claim)]
    cluster.kill_ranks(copy=1)
    wait_until(lambda: list_dead() == (1,))
    scheduler.restart(id, 1)
    wait_until(lambda: count_starts(1) == 2)
    assert list_dead() == ()
    found = scheduler.find(request.name)
    assert found is not None
    assert (found.id, found.state) == (id, JobState.RUNNING)
    scheduler.end(id, GRACE_S)
    ended = scheduler.look(id)
    assert ended is not None
    assert ended.state.is_final
    assert {failure.interrupted for failure in read_failures(request)} == {True}
    assert len(list((request.files.path / "earlier").iterdir())) == 1
    assert scheduler.list() == []
    assert cluster.nodes_are("idle")
