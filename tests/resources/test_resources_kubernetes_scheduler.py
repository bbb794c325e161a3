"""TrainJobs on a fake cluster that runs their commands: created once, followed, ended, and what goes wrong is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_kubernetes import TRAINJOBS
from kubernetes_toys import KubernetesBench, kubernetes_bench
from waiting import wait_until

from draftworks.errors import LauncherError
from draftworks.programs.failure import RankFailure
from resources.kubernetes_scheduler import KubernetesScheduler
from resources.torch_job import JobState


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KubernetesBench]:
    with kubernetes_bench(tmp_path) as bench:
        yield bench


def test_three_calls_are_made_before_a_job_exists(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request()
    assert scheduler.find(request.name) is None
    id = scheduler.create(request)
    assert [verb for verb, _, _ in bench.cluster.calls] == ["GET", "GET", "POST"]
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.state, seen.lost, seen.claim) == (JobState.SUCCEEDED, False, request.claim), seen.reason
    assert request.files.log.read_text() == "node 0 does end\n"
    assert scheduler.find(request.name) == seen


def test_a_program_that_fails_is_not_lost(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request("fail")
    seen = bench.wait_for_end(scheduler, scheduler.create(request))
    assert (seen.state, seen.lost) == (JobState.FAILED, False)
    assert "exit code 3" in seen.reason
    assert "no such option" in request.files.log.read_text()


def test_every_node_has_its_own_log_and_the_first_ones_is_the_jobs(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request(nodes=2)
    assert bench.wait_for_end(scheduler, scheduler.create(request)).state is JobState.SUCCEEDED
    assert request.files.log.read_text() == "node 0 does end\n"
    assert request.files.log.with_name("out-node1.log").read_text() == "node 1 does end\n"
    assert {path.parent.name for path in request.files.ranks.rglob("task")} == {"node0", "node1"}


def test_an_ended_job_got_its_grace_and_leaves_nothing(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait"))
    bench.wait_for_start()
    scheduler.end(id, 5.0)
    assert (bench.signs / "saved0").exists()
    assert scheduler.look(id) is None
    bench.assert_nothing_left()
    scheduler.end(id, 5.0)


def test_a_short_grace_ends_a_rank_that_does_not_listen(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("ignore"))
    bench.wait_for_start()
    scheduler.end(id, 0.0)
    assert not (bench.signs / "saved0").exists()
    bench.assert_nothing_left()


def test_ending_a_job_that_has_ended_keeps_it(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request()
    id = scheduler.create(request)
    seen = bench.wait_for_end(scheduler, id)
    scheduler.end(id, 0.0)
    assert bench.make_scheduler().look(id) == seen


def test_a_suspended_job_waits_and_goes_on_with_its_earlier_files_put_away(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(queue="research"), bench.request("wait")
    id = scheduler.create(request)
    bench.wait_for_start()
    bench.wait_for(scheduler, id, JobState.RUNNING)
    bench.cluster.pre_empted.add(request.name)
    bench.wait_for(scheduler, id, JobState.PENDING, "suspended by Kueue; it waits in the queue research")
    wait_until(lambda: not bench.cluster.list_processes())
    assert (bench.signs / "saved0").exists()
    bench.cluster.pre_empted.clear()
    bench.finish()
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.state, seen.lost) == (JobState.SUCCEEDED, False)
    assert len(list((request.files.path / "earlier").rglob("task"))) == 1
    assert len(list(request.files.ranks.rglob("task"))) == 1


@pytest.mark.parametrize("way", ["delete_pod", "drain_node"])
def test_a_pod_that_goes_under_us_means_that_the_job_is_lost(bench: KubernetesBench, way: str) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait"))
    bench.wait_for_start()
    bench.wait_for(scheduler, id, JobState.RUNNING)
    getattr(bench.cluster, way)()
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.state, seen.lost) == (JobState.FAILED, True)
    assert ("was deleted" if way == "delete_pod" else "DeletionByTaintManager") in seen.reason
    assert (bench.signs / "saved0").exists()


def test_a_rank_that_fails_because_another_pod_went_does_not_hide_that(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait", nodes=2))
    bench.wait_for_start(0, 1)
    bench.wait_for(scheduler, id, JobState.RUNNING)
    bench.cluster.drain_node(1)
    bench.finish(0, code=1)
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.state, seen.lost) == (JobState.FAILED, True)
    assert "DeletionByTaintManager" in seen.reason


def test_a_train_job_that_is_deleted_under_us_is_cancelled_when_its_pods_are_gone(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request("wait")
    id = scheduler.create(request)
    bench.wait_for_start()
    bench.wait_for(scheduler, id, JobState.RUNNING)
    job = bench.cluster.store.get(TRAINJOBS, request.name)
    assert job is not None
    bench.cluster.mark_deleted(TRAINJOBS, job)
    seen = bench.wait_for_end(scheduler, id)
    assert not bench.cluster.list_processes()
    assert (seen.state, seen.lost) == (JobState.CANCELLED, False)
    assert seen.reason == f"TrainJob {request.name} was deleted"
    assert bench.make_scheduler().look(id) is None


def test_creating_the_same_job_twice_makes_one(bench: KubernetesBench) -> None:
    first, second = bench.request("wait"), bench.request("wait")
    scheduler = bench.make_scheduler()
    id = scheduler.create(first)
    assert bench.make_scheduler().create(second) == id
    bench.wait_for_start()
    assert len(bench.cluster.store.list(TRAINJOBS)) == 1
    assert first.files.log.exists()
    assert not second.files.log.exists()
    scheduler.end(id, 5.0)


def test_a_next_attempt_takes_the_place_of_an_ended_one(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    first = scheduler.create(bench.request("fail"))
    bench.wait_for_end(scheduler, first)
    second = scheduler.create(bench.request("end"))
    assert second != first
    assert bench.wait_for_end(scheduler, second).state is JobState.SUCCEEDED
    assert bench.make_scheduler().look(first) is None


def test_a_job_of_someone_else_is_left_alone(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait"))
    other = bench.request("wait")
    with pytest.raises(LauncherError, match="there is a TrainJob dw-0123456789abcdef of someone else"):
        scheduler.create(type(other)(other.name, other.job, other.env, other.files, bench.var / "another.json"))
    scheduler.end(id, 0.0)


def test_expired_and_broken_watches_are_begun_again(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait"))
    bench.wait_for_start()
    bench.wait_for(scheduler, id, JobState.RUNNING)
    wait_until(lambda: bench.cluster.watches >= 2)
    before = bench.cluster.watches
    bench.cluster.break_watches()
    wait_until(lambda: bench.cluster.watches >= before + 2)
    bench.cluster.store.write(TRAINJOBS, {"metadata": {"name": "other"}, "spec": {}}, "DELETED")
    bench.cluster.store.compact()
    bench.finish()
    assert bench.wait_for_end(scheduler, id).state is JobState.SUCCEEDED


def test_a_server_that_is_away_is_waited_for_and_not_for_ever(bench: KubernetesBench) -> None:
    scheduler, hasty = bench.make_scheduler(), KubernetesScheduler(bench.make_spec(), silence_s=0.0)
    bench.schedulers.append(hasty)
    id = scheduler.create(bench.request("wait"))
    bench.wait_for_start()
    for each in (scheduler, hasty):
        bench.wait_for(each, id, JobState.RUNNING)
    bench.cluster.down = True
    bench.cluster.break_watches()
    with pytest.raises(LauncherError, match="the API server cannot be reached"):
        wait_until(lambda: hasty.look(id) is None)
    bench.wait_for(scheduler, id, JobState.RUNNING)
    bench.cluster.down = False
    bench.finish()
    assert bench.wait_for_end(scheduler, id).state is JobState.SUCCEEDED


def test_an_image_that_cannot_be_pulled_ends_the_job_with_the_clusters_words(bench: KubernetesBench) -> None:
    bench.cluster.images = set()
    scheduler = bench.make_scheduler(start_patience_s=0)
    seen = bench.wait_for_end(scheduler, scheduler.create(bench.request()))
    assert (seen.state, seen.lost) == (JobState.FAILED, False)
    assert 'ImagePullBackOff: Back-off pulling image "registry.example/draftworks:1": not found' in seen.reason
    bench.assert_nothing_left()


def test_a_job_without_room_waits_with_the_clusters_words(bench: KubernetesBench) -> None:
    bench.cluster.free_nodes = 0
    scheduler = bench.make_scheduler(start_patience_s=0)
    id = scheduler.create(bench.request())
    bench.wait_for(
        scheduler, id, JobState.PENDING, "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    )
    bench.cluster.free_nodes = 1
    assert bench.wait_for_end(scheduler, id).state is JobState.SUCCEEDED


def test_a_job_that_may_goes_on_with_the_nodes_that_have_room(bench: KubernetesBench) -> None:
    bench.cluster.free_nodes = 1
    scheduler = bench.make_scheduler(start_patience_s=0)
    request = bench.request("wait", nodes=3, min_nodes=1)
    seen = bench.wait_for_end(scheduler, scheduler.create(request))
    assert (seen.state, seen.lost) == (JobState.FAILED, True)
    assert seen.reason == "there is room for 1 of its 3 nodes"
    bench.assert_nothing_left()
    id = scheduler.create(request)
    bench.finish()
    assert bench.wait_for_end(scheduler, id).state is JobState.SUCCEEDED
    assert [len(pod["metadata"]["name"]) for pod in bench.cluster.pod_manifests[3:]] == [len(request.name) + 9]


def test_a_job_waits_for_room_if_too_few_nodes_have_it(bench: KubernetesBench) -> None:
    bench.cluster.free_nodes = 1
    scheduler = bench.make_scheduler(start_patience_s=0)
    id = scheduler.create(bench.request("wait", nodes=3, min_nodes=2))
    bench.wait_for_start()
    bench.wait_for(scheduler, id, JobState.PENDING, "Unschedulable")
    scheduler.end(id, 0.0)


def test_a_job_whose_creation_was_not_answered_is_found(bench: KubernetesBench) -> None:
    bench.cluster.lost_answers = 1
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request())
    assert [job["metadata"]["uid"] for job in bench.cluster.store.list(TRAINJOBS)] == [id.split("/")[2]]
    assert bench.wait_for_end(scheduler, id).state is JobState.SUCCEEDED


def test_a_pod_without_the_shared_folder_says_so(bench: KubernetesBench, tmp_path: Path) -> None:
    bench.cluster.claims["shared"] = tmp_path / "elsewhere"
    scheduler = bench.make_scheduler()
    seen = bench.wait_for_end(scheduler, scheduler.create(bench.request()))
    assert (seen.state, seen.lost) == (JobState.FAILED, False)
    assert "is not there in this pod: mount the volume that has it at the same path" in seen.reason


def test_the_deadline_ends_a_job_that_may_go_on(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler(time_limit_s=1)
    seen = bench.wait_for_end(scheduler, scheduler.create(bench.request("wait")))
    assert (seen.state, seen.lost) == (JobState.FAILED, True)
    assert "DeadlineExceeded" in seen.reason


def test_a_killed_rank_is_told_by_its_exit_code(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    id = scheduler.create(bench.request("wait"))
    bench.wait_for_start()
    for process in bench.cluster.list_processes():
        process.send_signal(signal.SIGKILL)
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.state, seen.lost) == (JobState.FAILED, False)
    assert "exit code" in seen.reason


def test_the_list_has_what_lives_and_forgets_what_ended_long_ago(bench: KubernetesBench) -> None:
    scheduler = bench.make_scheduler()
    alive = scheduler.create(bench.request("wait", name="dw-1"))
    bench.wait_for_end(scheduler, scheduler.create(bench.request("end", name="dw-2")))
    assert [seen.id for seen in scheduler.list()] == [alive]
    assert bench.cluster.store.get(TRAINJOBS, "dw-2") is not None
    assert [seen.id for seen in bench.make_scheduler(keep_ended_hours=1e-9).list()] == [alive]
    wait_until(lambda: bench.cluster.store.get(TRAINJOBS, "dw-2") is None)
    scheduler.end(alive, 0.0)


def test_copies_are_one_train_job_of_which_a_deleted_pod_comes_back_alone(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request("wait", copies=3)
    id = scheduler.create(request)
    bench.wait_for_start(0, 1, 2)
    bench.wait_for(scheduler, id, JobState.RUNNING)
    (bench.signs / "started1").unlink()
    bench.cluster.delete_pod(1)
    bench.wait_for_start(1)
    assert (bench.signs / "saved1").exists()
    assert not (bench.signs / "saved0").exists()
    bench.wait_for(scheduler, id, JobState.RUNNING)
    for copy in range(3):
        bench.finish(copy)
    seen = bench.wait_for_end(scheduler, id)
    assert (seen.id, seen.state, seen.dead) == (id, JobState.SUCCEEDED, ()), seen.reason
    for copy, starts in enumerate((1, 2, 1)):
        assert request.files.of_copy(copy).log.read_text() == starts * f"copy {copy} does wait\n"
        assert (request.files.of_copy(copy).ranks / "task").exists()
    assert [path.name.split("-")[0] for path in (request.files.path / "earlier").iterdir()] == ["copy1"]
    assert [event.kind for event in bench.cluster.store.events if event.plural == TRAINJOBS].count("ADDED") == 1


def test_a_copy_whose_program_has_failed_is_not_started_again(bench: KubernetesBench) -> None:
    scheduler, request = bench.make_scheduler(), bench.request("wait", copies=2)
    id = scheduler.create(request)
    bench.wait_for_start(0, 1)
    error = request.files.of_copy(1).ranks / "none" / "error.json"
    error.parent.mkdir()
    error.write_text(json.dumps(RankFailure.of(ValueError("v"), rank=0).to_json()))
    bench.finish(1, code=1)

    def is_dead() -> bool:
        seen = scheduler.look(id)
        assert seen is not None
        assert not seen.state.is_final
        return [(each.number, each.lost) for each in seen.dead] == [(1, False), (1, False)]

    wait_until(is_dead)
    assert error.exists(), "what it has left stays to be read"
    scheduler.end(id, 5.0)
    assert (bench.signs / "saved0").exists()
    bench.assert_nothing_left()
