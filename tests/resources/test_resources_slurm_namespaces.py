"""Slurm's two nodes in two network namespaces: ranks meet over addresses that no host name leads to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from network_namespaces import two_hosts
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_until

from draftworks.config.launchers import SlurmLauncherSpec
from resources.scheduler import JobRequest
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


def test_ranks_of_two_hosts_meet_and_stop(cluster: SlurmCluster, tmp_path: Path) -> None:
    scheduler = SlurmScheduler(SlurmLauncherSpec(commands=str(cluster.commands), grace_s=60))
    file, files = tmp_path / "run.yaml", RunDir.create(tmp_path / "runs", "0123456789", 0)
    file.write_text(yaml.safe_dump({"out": ".", "task": "meet and wait", "ranks": 2}))
    job = TorchJob("frame_program", (str(file),), nodes=2)
    id = scheduler.create(JobRequest("dw-meet", job, {"PYTHONPATH": PROGRAMS}, files, tmp_path / "job.json"))

    def has_ended() -> bool:
        seen = scheduler.look(id)
        return seen is not None and seen.state.is_final

    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, files.log.read_text, possible=lambda: not has_ended())
    scheduler.end(id, 60)
    wait_until(has_ended)
    assert scheduler.look(id).state is JobState.FAILED, files.log.read_text()
    assert len(list(tmp_path.glob("saved-*"))) == 2, files.log.read_text()
