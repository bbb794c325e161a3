"""The graph and its training on a real Slurm of two nodes: the local draft, on one node and on two, cancelled and gone on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
import yaml
from coverings import gate_or_long
from safetensors.torch import load_file
from slurm_cluster import SlurmCluster
from test_spec_assets_arrival import ROWS, STEPS, digest_source_order, let_arrive
from test_spec_assets_arrival import run as run_in_arrival_order
from waiting import find_now, meanwhile, wait_for, wait_until

from draftworks.config.launchers import SlurmLauncherSpec
from draftworks.config.run_files import CaptureRun, TrainRun
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.failure import RankFailure
from draftworks.storage.artifacts import ArtifactStore
from draftworks.training.checkpoint_files import CheckpointFolder
from draftworks.training.history import History
from resources.scheduler import JobRequest
from resources.scheduler_launcher import SchedulerLauncher
from resources.slurm_scheduler import SlurmScheduler
from resources.torch_job import JobIdentity, JobState, RunDir, TorchJob

# The first of them makes `finished_site` too: on a busy machine that alone takes minutes.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
WEIGHTS = "model.safetensors"


@pytest.fixture
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    yield slurm
    slurm.empty()


def find_draft(site: Any) -> Path:
    return ArtifactStore(site.var).load_current("eagle3_draft", "small").path


def write_run(finished_site: Any, out: Path, **training: Any) -> TrainRun:
    """The run file of the finished draft, with a folder of its own."""
    (path,) = finished_site.var.glob("runs/*/eagle3_draft/run.yaml")
    run = TrainRun.load(path)
    return run.model_copy(update={"out": out, "training": run.training.model_copy(update=training)})


def start(cluster: SlurmCluster, run: TrainRun, folder: Path, nodes: int) -> tuple[SlurmScheduler, str, RunDir]:
    run.out.mkdir(parents=True, exist_ok=True)
    file = run.save(folder / "run.yaml")
    files = RunDir.create(folder / "runs", "0123456789", 0)
    job = TorchJob("draftworks.programs.train", (str(file),), nodes=nodes, procs_per_node=2 // nodes)
    scheduler = SlurmScheduler(SlurmLauncherSpec(commands=str(cluster.commands), grace_s=60))
    env = {"TORCHELASTIC_ERROR_FILE": str(files.error), "PYTHONUNBUFFERED": "1"}
    return scheduler, scheduler.create(JobRequest("dw-training", job, env, files, folder / "job.json")), files


def wait_for_end(scheduler: SlurmScheduler, id: str) -> JobState:
    return wait_for(lambda: seen.state if (seen := scheduler.look(id)) and seen.state.is_final else None)


def wait_for_words(scheduler: SlurmScheduler, id: str, files: RunDir, words: str) -> None:
    def runs() -> bool:
        seen = scheduler.look(id)
        return seen is not None and not seen.state.is_final

    wait_until(
        lambda: files.log.exists() and words in files.log.read_text(), lambda: files.log.read_text(), possible=runs
    )


def test_the_graph_on_slurm_gives_the_local_draft_bit_for_bit(
    finished_site: Any, cluster: SlurmCluster, tmp_path: Path
):
    site = finished_site.copy(tmp_path / "site")
    shutil.rmtree(site.var)
    launcher = {"kind": "slurm", "commands": str(cluster.commands), "poll_interval_s": 0.2}
    (site.registry / "deployment.yaml").write_text(yaml.safe_dump({"launcher": launcher}))
    job = site.definitions().resolve_job_def("everything")
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(partition_key="small", raise_on_error=False, instance=instance)
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    for asset in ("eagle3_draft", "eagle3_export"):
        here, there = (ArtifactStore(each.var).load_current(asset, "small") for each in (site, finished_site))
        weights = [path.relative_to(there.path) for path in there.path.rglob("*.safetensors")]
        kept = [path for path in weights if "checkpoints" not in path.parts]
        assert kept
        assert [path for path in kept if (here.path / path).read_bytes() != (there.path / path).read_bytes()] == []
    for asset in ("training_features", "eagle3_draft"):
        here, there = (ArtifactStore(each.var).load_current(asset, "small") for each in (site, finished_site))
        assert (here.path.name, here.data_version) == (there.path.name, there.data_version), asset
    assert cluster.ask("squeue", "--noheader") == ""
    assert not list(site.var.rglob("job.json"))


def read_features(site: Any) -> dict[str, dict[str, torch.Tensor]]:
    found = read_feature_set(ArtifactStore(site.var).load_current("training_features", "small").path)
    (run,) = site.var.glob("runs/*/training_features/run.yaml")
    store = open_store(CaptureRun.load(run).store)
    try:
        return {ref.sample_id: {name: each.clone() for name, each in store.get(ref)[0].items()} for ref in found.refs}
    finally:
        store.close()


@pytest.mark.long
def test_workers_are_an_array_and_a_killed_one_changes_no_byte(
    finished_site: Any, cluster: SlurmCluster, tmp_path: Path
):
    """The first job waits until a copy was killed and has begun again, so that copies do the work that is then compared."""
    site = finished_site.copy(tmp_path / "site")
    shutil.rmtree(site.var)
    begin = tmp_path / "begin"
    hold = f'[ -n "${{DRAFTWORKS_COPY:-}}" ] || while [ ! -e {begin} ]; do sleep 0.1; done'
    programs = {"regenerate": {"workers": 3}, "capture": {"workers": 3, "setup": [hold]}}
    launcher = {"kind": "slurm", "commands": str(cluster.commands), "poll_interval_s": 0.2, "programs": programs}
    (site.registry / "deployment.yaml").write_text(yaml.safe_dump({"launcher": launcher}))

    def kill_one() -> None:
        folder = site.var / "runs"
        pattern = "*/training_features/capture-workers/*/ranks/copy1/*/attempt_0"
        ranks = wait_for(lambda: next(iter(find_now(folder, pattern)), None), "a copy's rank")
        cluster.kill_ranks(copy=1)
        wait_until(lambda: not ranks.exists(), "that the next start puts the files of the one before away")
        begin.touch()

    job = site.definitions().resolve_job_def("prepare")
    assets = ("target_model", "dataset", "recipe", "conversations", "responses", "tokenized_train", "training_features")
    with meanwhile(kill_one), dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(
            partition_key="small",
            asset_selection=[dg.AssetKey(each) for each in assets],
            instance=instance,
            raise_on_error=False,
        )
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    for asset in ("responses", "training_features"):
        here, there = (ArtifactStore(each.var).load_current(asset, "small") for each in (site, finished_site))
        assert (here.path.name, here.data_version) == (there.path.name, there.data_version), asset
    here, there = read_features(site), read_features(finished_site)
    assert here.keys() == there.keys()
    for sample, features in there.items():
        assert all(torch.equal(features[name], here[sample][name]) for name in features), sample
    folders = [path.name for path in site.var.glob("runs/*/*/*-workers")]
    assert sorted(folders) == ["capture-workers", "regenerate-workers"]
    assert len(list(site.var.glob("runs/*/training_features/capture-workers/*/earlier/copy1-*"))) == 1
    assert cluster.ask("squeue", "--noheader") == ""
    assert not list(site.var.rglob("*job.json"))
    assert not list((site.var / "workers").rglob("figures.json"))


@pytest.mark.parametrize("shard_within", gate_or_long(["job", "node"], ["node"]))
def test_two_nodes_train_what_one_does(finished_site: Any, shard_within: str, cluster: SlurmCluster, tmp_path: Path):
    run = write_run(finished_site, tmp_path / "out", shard_within=shard_within)
    scheduler, id, files = start(cluster, run, tmp_path, nodes=2)
    assert wait_for_end(scheduler, id) is JobState.SUCCEEDED, files.log.read_text()
    found, expected = load_file(tmp_path / "out" / WEIGHTS), load_file(find_draft(finished_site) / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_after_a_lost_node_a_training_goes_on_with_fewer(finished_site: Any, cluster: SlurmCluster, tmp_path: Path):
    run = write_run(finished_site, tmp_path / "out", epochs=16.0, save_every=10, log_every=5)
    run.out.mkdir()
    file = run.save(tmp_path / "run.yaml")
    own = {"kind": "slurm", "commands": str(cluster.commands), "poll_interval_s": 0.2, "nodes": 2, "min_nodes": 1}
    identity = JobIdentity("dw-lost", tmp_path / "job.json", "small/draft", (run.checkpoints,))
    job = TorchJob("draftworks.programs.train", (str(file),), nodes=2, identity=identity)
    reports = []

    @dg.asset
    def draft(context) -> dg.MaterializeResult:
        launcher = SchedulerLauncher(settings=json.dumps(own), files_lag_s=1.0)
        reports.append(launcher.run(context, job, run_dir=tmp_path / "runs"))
        return dg.MaterializeResult()

    def lose_a_node() -> None:
        wait_until(CheckpointFolder(run.checkpoints, run.run_id).steps, "a checkpoint")
        cluster.lose_node("n2")

    try:
        with meanwhile(lose_a_node), dg.DagsterInstance.ephemeral() as instance:
            dg.materialize([draft], instance=instance)
    finally:
        cluster.start_node("n2")
    (done,) = reports
    assert done.metadata["submissions"] == 2
    first, second = History.load(tmp_path / "out" / "history.json").sessions
    assert (first.start_step, first.world_size, second.world_size) == (0, 2, 1)
    assert second.start_step > 0


@pytest.mark.long
def test_a_cancelled_training_leaves_a_checkpoint_and_goes_on(
    finished_site: Any, cluster: SlurmCluster, tmp_path: Path
):
    run = write_run(finished_site, tmp_path / "out", epochs=2000.0, save_every=0, log_every=1)
    scheduler, id, files = start(cluster, run, tmp_path / "first", nodes=1)
    wait_for_words(scheduler, id, files, "step=3")
    cluster.ask("scancel", id)
    assert wait_for_end(scheduler, id) is JobState.CANCELLED
    failures = [RankFailure.read(path) for path in files.ranks.rglob("error.json")]
    assert len(failures) == 2
    assert all(failure is not None and failure.interrupted for failure in failures), files.log.read_text()
    saved = CheckpointFolder(run.checkpoints, run.run_id).steps()
    assert saved, files.log.read_text()
    scheduler, id, files = start(cluster, run, tmp_path / "second", nodes=1)
    wait_for_words(scheduler, id, files, f"step={saved[-1] + 1}")
    scheduler.end(id, 60)
    assert CheckpointFolder(run.checkpoints, run.run_id).steps()[-1] > saved[-1]


@pytest.mark.long
def test_rows_that_still_come_are_trained_on_in_jobs_as_here(finished_site: Any, cluster: SlurmCluster, tmp_path: Path):
    drafts = []
    launcher = {"kind": "slurm", "commands": str(cluster.commands), "poll_interval_s": 0.2}
    for name, deployment in (("here", {}), ("jobs", {"launcher": launcher})):
        site = finished_site.copy(tmp_path / name)
        (site.registry / "deployment.yaml").write_text(yaml.safe_dump(deployment))
        site.write_chats(ROWS)
        let_arrive(site, until={"steps": STEPS})
        run_in_arrival_order(site)
        drafts.append(ArtifactStore(site.var).load_current("eagle3_draft", "small"))
    assert [each.summary["order"] for each in drafts] == [digest_source_order(site)] * 2
    assert drafts[0].data_version == drafts[1].data_version
    assert cluster.ask("squeue", "--noheader") == ""
