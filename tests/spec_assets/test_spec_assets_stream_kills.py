"""A streamed training goes on by itself when a process of it is killed, and ends with the weights of the undisturbed one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml
from toy_cluster import ToyCluster, pausing
from waiting import meanwhile, wait_until

from draftworks.config.run_files import ProduceRun, StreamPlace
from draftworks.programs.heartbeat import HeartbeatRecord
from draftworks.storage.artifacts import ArtifactStore
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore

STREAMING = {"watermark": {"samples": 16}, "lease_s": 4, "control": {}}
LONG = {"epochs": 6, "save_every": 4, "log_every": 30}


@pytest.fixture(scope="module")
def planned(finished_site, tmp_path_factory) -> Any:
    """The finished site with `streaming`, about to train on features that are planned."""
    site = finished_site.copy(tmp_path_factory.mktemp("planned"))
    for made in ("training_features", "eagle3_draft", "eagle3_report", "eagle3_export"):
        shutil.rmtree(site.var / made / "small", ignore_errors=True)
    entry = yaml.safe_load(site.target_file.read_text())
    site.target_file.write_text(yaml.safe_dump({**entry, "streaming": STREAMING}))
    assert site.run("prepare").success
    return site


def train(site) -> dg.ExecuteInProcessResult:
    config = {"ops": {"eagle3_draft": {"config": {"training": LONG}}}}
    return site.run("train_eagle3", run_config=config, asset_selection=[dg.AssetKey("eagle3_draft")])


def read_draft(site):
    return ArtifactStore(site.var).load_current("eagle3_draft", "small")


@pytest.fixture(scope="module")
def undisturbed(planned, tmp_path_factory) -> str:
    site = planned.copy(tmp_path_factory.mktemp("undisturbed"))
    assert train(site).success
    return read_draft(site).data_version


class Stream:
    """The processes of the streamed training that runs in a site, as a test finds and kills them."""

    def __init__(self, site, rank: int = 1) -> None:
        self._site = site
        self._rank = rank
        self.killed: list[str] = []

    def read_run(self) -> ProduceRun:
        (path,) = self._site.var.glob("runs/*/eagle3_draft/produce/run.yaml")
        return ProduceRun.load(path)

    def read_acked_step(self) -> int:
        """Read the database itself: a client would wait for the server that was killed, and a retry writes run files anew."""
        for path in self._site.var.glob("streams/*/*/control.sqlite"):
            with closing(SQLiteMetadataStore(path)) as store:
                return DataFlowController(StreamPlace.model_fields["run_id"].default, store).read_progress().acked_step
        return 0

    def find_rank(self, program: str, rank: int = 0) -> psutil.Process:
        """Return a rank of the newest attempt of a program."""
        folder = "eagle3_draft/produce" if program == "produce" else "eagle3_draft"
        paths = self._site.var.glob(f"runs/*/{folder}/*-retry*/ranks/**/{rank}/heartbeat.json")
        pulse = HeartbeatRecord.read(max(paths, key=lambda path: path.stat().st_mtime))
        return psutil.Process(pulse.pid)

    def find_control_server(self) -> psutil.Process:
        port = int(self.read_run().stream.control.rpartition(":")[2])
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any(c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections()):
                    return process
        raise AssertionError("no process listens at the control server's address")

    def kill(self, name: str) -> None:
        process = (
            self.find_control_server()
            if name == "control"
            else self.find_rank(name, rank=self._rank if name == "train" else 0)
        )
        process.kill()
        self.killed.append(name)


@contextmanager
def killing(site, plan: dict[int, str], rank: int = 1) -> Iterator[Stream]:
    """Kill the processes of the plan, each when the training has done that optimizer step; of the trainer this rank."""
    stream = Stream(site, rank)

    def work() -> None:
        for step, name in plan.items():
            wait_until(lambda step=step: stream.read_acked_step() >= step, f"step {step}")
            stream.kill(name)

    with meanwhile(work):
        yield stream


@pytest.mark.long
def test_kills_of_the_control_server_a_producer_and_a_rank_change_nothing(planned, undisturbed, tmp_path: Path):
    site = planned.copy(tmp_path)
    plan = {1: "produce", 3: "control", 5: "train", 9: "control", 13: "produce"}
    with killing(site, plan) as stream:
        result = train(site)
    assert result.success
    assert stream.killed == list(plan.values())
    retried = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY]
    assert len(retried) == 1, "for the rank; the others are started again beside it"
    assert [session["from_step"] for session in read_draft(site).summary["sessions"]] == [0, 4]
    assert read_draft(site).data_version == undisturbed
    assert not list((site.var / "streams").rglob("*.safetensors"))
    assert not list((site.var / "streams").rglob("*.sqlite*"))


@pytest.mark.long
def test_a_stream_in_a_scheduler_is_taken_over_from_a_killed_run(planned, undisturbed, tmp_path: Path):
    """The control server ends with its run, and is started again where trainer and producers look for it."""
    cluster = ToyCluster.create(planned.copy(tmp_path))
    jobs = [("eagle3_draft", ""), ("eagle3_draft", "produce")]
    try:
        run = cluster.start("eagle3_draft", eagle3_draft={"training": LONG})
        wait_until(lambda: Stream(cluster.site).read_acked_step() >= 2)
        with pausing(lambda: cluster.find_ranks("train")):
            cluster.kill_run(run, "eagle3_draft")
        before = [cluster.require_claim(*job).owner for job in jobs]
        following = cluster.start("target_model", "eagle3_draft", eagle3_draft={"training": LONG})
        assert following.wait() == 0, cluster.log.read_text()
        assert len(before) == len(cluster.scheduler.look_at_all()), "no job was made a second time"
        lines = cluster.read_lines(cluster.list_runs()[-1].run_id)
        assert sum("it is waited for" in line for line in lines) == len(jobs)
        assert [session["from_step"] for session in read_draft(cluster.site).summary["sessions"]] == [0]
        assert read_draft(cluster.site).data_version == undisturbed
        assert read_draft(cluster.site).summary["stream"]["captured_samples"] > 0
        assert not list((cluster.site.var / "streams").rglob("*.sqlite*"))
        assert cluster.list_left() == []
    finally:
        cluster.clean_up()
