"""The death of a run leaves its job in the scheduler, and the next run of the same makes no other; a cancelled one ends it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from toy_cluster import ToyCluster, pausing
from waiting import find_now, wait_until

from draftworks.storage.artifacts import Artifact, ArtifactStore
from resources.dead_runs import DeadRuns, release_dead_runs
from resources.job_messages import parse_message
from resources.torch_job import JobState

DRAFT, FEATURES = "eagle3_draft", "heldout_eval_features"
CHECKPOINTS = f"{DRAFT}/small/*.partial/checkpoints/*/checkpoint.json"
LONG = {"processes": 1, "epochs": 8, "save_every": 6, "log_every": 6}
ENDLESS = {**LONG, "epochs": 5000}


@pytest.fixture
def cluster(finished_site: Any, tmp_path: Path) -> Iterator[ToyCluster]:
    cluster = ToyCluster.create(finished_site.copy(tmp_path))
    yield cluster
    cluster.clean_up()


def read_messages(file: Path) -> list[str]:
    """Return the log lines that a job has sent to its run."""
    messages = [parse_message(line) for line in file.read_bytes().splitlines(keepends=True)]
    return [each["params"]["message"] for each in messages if each is not None and each["method"] == "log"]


def expect_shown_once(cluster: ToyCluster, messages: list[str]) -> None:
    """Every line of a job is in the log of one of the runs, in the order in which they were sent."""
    lines = cluster.read_lines(*(run.run_id for run in cluster.list_runs()))
    assert [line for line in lines if line in messages] == messages


def find_artifact(site: Any, asset: str) -> Artifact:
    return ArtifactStore(site.var).load_current(asset, "small")


def list_entry_files(site: Any) -> list[str]:
    return sorted(path.name for path in site.var.glob("eval_cache/*/*") if path.parent.suffix != ".lock")


@pytest.mark.long
def test_a_capture_of_eval_features_is_taken_over_from_a_killed_run(cluster: ToyCluster, finished_site: Any):
    for name in ("eval_cache", "feature_store", FEATURES):
        shutil.rmtree(cluster.site.var / name)
    run = cluster.start(FEATURES)
    wait_until(lambda: cluster.find_claim(FEATURES) is not None and bool(cluster.find_ranks("capture")))
    with pausing(lambda: cluster.find_ranks("capture")):
        cluster.kill_run(run, FEATURES)
        earlier = cluster.require_claim(FEATURES)
        following = cluster.start("target_model", FEATURES)
        wait_until(lambda: cluster.require_claim(FEATURES).owner != earlier.owner)
    assert following.wait() == 0, cluster.log.read_text()
    assert [each.state for each in cluster.scheduler.look_at_all()] == [JobState.SUCCEEDED]
    expect_shown_once(cluster, read_messages(earlier.files.messages))
    here, there = find_artifact(cluster.site, FEATURES), find_artifact(finished_site, FEATURES)
    assert (here.path.name, here.data_version, here.files) == (there.path.name, there.data_version, there.files)
    assert list_entry_files(cluster.site) == list_entry_files(finished_site)
    assert cluster.list_left() == []


@pytest.mark.slow
def test_a_training_is_taken_over_from_a_killed_run_and_nothing_of_it_differs(cluster: ToyCluster, tmp_path: Path):
    shutil.rmtree(cluster.site.var / DRAFT)
    undisturbed = cluster.site.copy(tmp_path / "undisturbed")
    run = cluster.start(DRAFT, eagle3_draft={"training": LONG})
    wait_until(lambda: bool(find_now(cluster.site.var, CHECKPOINTS)))
    with pausing(lambda: cluster.find_ranks("train")):
        cluster.kill_run(run, DRAFT)
        earlier = cluster.require_claim(DRAFT)
        with cluster.open_instance() as instance:
            assert release_dead_runs(instance) == DeadRuns(kept=(earlier.owner.run_id,)), "its job uses the GPU"
        following = cluster.start("target_model", DRAFT, eagle3_draft={"training": LONG})
        wait_until(lambda: cluster.require_claim(DRAFT).owner != earlier.owner)
    assert following.wait() == 0, cluster.log.read_text()
    assert [each.state for each in cluster.scheduler.look_at_all()] == [JobState.SUCCEEDED]
    expect_shown_once(cluster, read_messages(earlier.files.messages))
    killed, finished = cluster.list_runs()
    assert (killed.status, finished.status) == (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS)
    assert cluster.list_left() == []
    (undisturbed.registry / "deployment.yaml").unlink()
    config = {"ops": {DRAFT: {"config": {"training": LONG}}}}
    assert undisturbed.run("train_eagle3", run_config=config, asset_selection=[dg.AssetKey(DRAFT)]).success
    here, there = find_artifact(cluster.site, DRAFT), find_artifact(undisturbed, DRAFT)
    assert (here.path.name, here.data_version) == (there.path.name, there.data_version)
    assert len(here.summary["sessions"]) == 1


@pytest.mark.slow
def test_a_run_that_is_cancelled_ends_its_job(cluster: ToyCluster):
    shutil.rmtree(cluster.site.var / DRAFT)
    run = cluster.start(DRAFT, eagle3_draft={"training": ENDLESS})
    wait_until(lambda: bool(cluster.find_ranks("train")) and bool(find_now(cluster.site.var, CHECKPOINTS)))
    with cluster.open_instance() as instance:  # as the UI does it
        instance.report_run_canceling(cluster.list_runs()[0])
    run.send_signal(signal.SIGINT)
    assert run.wait() != 0
    assert [each.state for each in cluster.scheduler.look_at_all()] == [JobState.CANCELLED]
    assert not cluster.find_ranks("train")
    (cancelled,) = cluster.list_runs()
    assert cancelled.status is dg.DagsterRunStatus.CANCELED
    assert find_now(cluster.site.var, CHECKPOINTS)
    assert cluster.list_left() == []
