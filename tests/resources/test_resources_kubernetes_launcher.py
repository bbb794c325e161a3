"""The contract of launchers over TrainJobs of a fake cluster, and what only Kubernetes does to a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from coverings import long_but_for
from fake_kubernetes import TRAINJOBS
from kubernetes_harness import KubernetesHarness
from kubernetes_toys import kubernetes_bench
from launcher_contract import IN_GATE, TOYS, SchedulerContract, play, wait_until_up
from waiting import wait_until

from resources.torch_job import JobState, TorchJob

pytestmark = pytest.mark.cluster  # not for what it needs, but for what it costs: real ranks


@long_but_for(*IN_GATE)
class TestKubernetes(SchedulerContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[KubernetesHarness]:
        with KubernetesHarness(tmp_path).running() as harness:
            yield harness

    @pytest.mark.long
    def test_a_job_that_kueue_suspends_goes_on_as_the_same_job(self, harness: KubernetesHarness):
        def take_the_place_away() -> None:
            wait_until_up(harness)
            harness.suspend()
            wait_until(lambda: not harness.cluster.list_processes())
            for up in harness.work.glob("up.*"):
                up.unlink()
            harness.resume()
            wait_until_up(harness)

        played = play(harness, "steps", take_the_place_away)
        (job,) = played.jobs
        assert "submissions" not in job.metadata
        assert harness.count_submitted() == 1
        assert [verb for verb, _, _ in harness.cluster.calls].index("POST") == 2, "three calls before the job exists"
        (checkpoint,) = (harness.work / "checkpoints").iterdir()
        assert f"begins at step {checkpoint.name}" in played.lines
        assert any("suspended by Kueue; it waits in the queue research" in line for line in played.lines)
        self.expect_nothing_left(harness)

    @pytest.mark.long
    def test_a_train_job_that_someone_deletes_stays_cancelled(self, harness: KubernetesHarness):
        def delete() -> None:
            wait_until_up(harness)
            (job,) = harness.cluster.store.list(TRAINJOBS)
            harness.cluster.mark_deleted(TRAINJOBS, job)
            wait_until(lambda: not harness.list_left())

        (failure,) = play(harness, "steps", delete).failures
        assert "was deleted" in f"{failure.description} {failure.metadata}"
        assert list((harness.work / "checkpoints").iterdir())
        assert harness.count_submitted() == 1
        self.expect_nothing_left(harness)

    def test_an_image_that_cannot_be_pulled_is_one_error(self, harness: KubernetesHarness):
        harness.cluster.images = set()
        (failure,) = play(harness, "steps", start_patience_s=0).failures
        assert 'Back-off pulling image "draftworks:1": not found' in failure.description
        self.expect_nothing_left(harness)


def test_torchruns_of_two_pods_meet(tmp_path: Path) -> None:
    with kubernetes_bench(tmp_path, python=sys.executable) as bench:
        scheduler, asked = bench.make_scheduler(), bench.request()
        env = {**asked.env, "PYTHONPATH": os.pathsep.join([str(TOYS), str(TOYS.parents[1])])}
        request = replace(asked, job=TorchJob("contract_worker", ("meet", str(bench.var)), nodes=2), env=env)
        seen = bench.wait_for_end(scheduler, scheduler.create(request))
        assert seen.state is JobState.SUCCEEDED, request.files.log.read_text()
        assert "rank 0 speaks" in request.files.log.read_text()
        assert "rank 1 speaks" in request.files.log.with_name("out-node1.log").read_text()
