"""Slurm's two nodes in two network namespaces: ranks meet over addresses that no host name leads to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from network_namespaces import two_hosts
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_for, wait_until

from draftworks.config.launchers import SlurmLauncherSpec
from resources.scheduler import JobRequest, SeenJob
from resources.slurm_scheduler import SlurmScheduler
from resources.torch_job import JobState, RunDir, TorchJob

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROGRAMS = str(Path(__file__).parents[1] / "programs")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    hosts = two_hosts()
    try:
        found = hosts.__enter__()
    except RuntimeError as error:
        message = (
            f"NOT TESTED: nodes with addresses of their own, as this user may not make network namespaces: {error}"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    try:
        with slurm_cluster(found) as running:
            yield running
    finally:
        hosts.__exit__(None, None, None)


def find_ended(scheduler: SlurmScheduler, id: str) -> SeenJob | None:
    seen = scheduler.look(id)
    return seen if seen is not None and seen.state.is_final else None


def test_ranks_of_two_hosts_meet_and_stop(cluster: SlurmCluster, tmp_path: Path) -> None:
    scheduler = SlurmScheduler(SlurmLauncherSpec(commands=str(cluster.commands), grace_s=60))
    for task, state in (("sum", JobState.SUCCEEDED), ("wait", JobState.FAILED)):
        file = tmp_path / f"{task}.yaml"
        file.write_text(yaml.safe_dump({"out": ".", "task": task, "ranks": 2}))
        files = RunDir.create(tmp_path / "runs", task, 0)
        job = TorchJob("frame_program", (str(file),), nodes=2)
        id = scheduler.create(JobRequest(f"dw-{task}", job, {"PYTHONPATH": PROGRAMS}, files, tmp_path / "job.json"))
        if task == "wait":
            wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, files.log.read_text)
            scheduler.end(id, 60)
        ended = wait_for(partial(find_ended, scheduler, id))
        assert ended.state is state, files.log.read_text()
    assert len(list(tmp_path.glob("saved-*"))) == 2
