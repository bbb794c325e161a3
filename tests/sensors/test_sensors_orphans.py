"""Jobs of a scheduler that no run waits for are ended after some minutes, and no others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from toy_scheduler import ToyLauncherSpec, offer_toy

from draftworks.errors import LauncherError
from draftworks.targets.registry import Registry
from resources.job_claims import JobClaim
from resources.process_tree import RunProcess
from resources.scheduler import JobRequest, Scheduler, SeenJob
from resources.torch_job import JobState, RunDir
from resources.workspace import Workspace
from sensors.orphans import list_scheduler_specs, make_orphan_sensor


@dataclass
class PlayedScheduler(Scheduler):
    jobs: list[SeenJob] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    is_silent: bool = False
    engine = "played"

    def create(self, request: JobRequest) -> str:
        raise NotImplementedError

    def find(self, name: str) -> SeenJob | None:
        raise NotImplementedError

    def look(self, id: str) -> SeenJob | None:
        raise NotImplementedError

    def end(self, id: str, grace_s: float) -> None:
        self.ended.append(id)
        self.jobs = [each for each in self.jobs if each.id != id]

    def list(self) -> list[SeenJob]:
        if self.is_silent:
            raise LauncherError("played: no answer")
        return self.jobs


@dataclass
class Site:
    """A deployment whose jobs run in a played scheduler."""

    root: Path
    instance: dg.DagsterInstance
    scheduler: PlayedScheduler
    cursor: str | None = None

    @property
    def registry(self) -> Registry:
        return Registry(self.root)

    def tick(self, minutes: float = 0.0) -> str:
        """Look once, `minutes` after the last look; returns what the sensor says."""
        if self.cursor is not None:
            self.cursor = json.dumps({key: at - 60 * minutes for key, at in json.loads(self.cursor).items()})
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        result = make_orphan_sensor(self.registry)(context, workspace=Workspace(registry_root=str(self.root)))
        self.cursor = result.cursor
        return result.skip_reason.skip_message

    def add_job(self, id: str, run_id: str, alive: bool = True, claims: bool = True, var: str = "var") -> None:
        path = self.root / var / "draft" / f"{id}.partial" / "job.json"
        owner = RunProcess.of(run_id, os.getpid())
        owner = owner if alive else replace(owner, started=owner.started - 1)
        claim = JobClaim.begin(f"dw-{id}", "t/draft", RunDir(path.parent), owner, ToyLauncherSpec(root="x"))
        if claims:
            claim.of_job(id).publish(path)
        self.scheduler.jobs.append(SeenJob(id, claim.name, JobState.RUNNING, claim=path))

    def add_run(self, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> str:
        return create_run_for_test(self.instance, job_name="job", status=status).run_id


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    offer_toy()
    scheduler = PlayedScheduler()
    monkeypatch.setattr("sensors.orphans.make_scheduler", lambda spec: scheduler)
    (tmp_path / "targets").mkdir()
    (tmp_path / "deployment.yaml").write_text("var: var\nlauncher: {kind: toy, root: x, orphan_minutes: 10}\n")
    instance = dg.DagsterInstance.ephemeral()
    yield Site(tmp_path, instance, scheduler)
    instance.dispose()


def test_jobs_without_a_living_run_are_ended_after_some_minutes(site: Site):
    site.add_job("waited-for", site.add_run())
    site.add_job("run-killed", site.add_run(), alive=False)
    site.add_job("run-over", site.add_run(dg.DagsterRunStatus.CANCELED))
    site.add_job("run-deleted", "gone")
    site.add_job("claim-gone", site.add_run(), claims=False)
    site.add_job("of-another-deployment", "gone", var="../elsewhere")
    site.scheduler.jobs.append(SeenJob("no-claim", "dw-x", JobState.RUNNING))
    site.tick()
    site.tick(minutes=9)
    assert site.scheduler.ended == []
    assert "ended job run-killed of toy" in site.tick(minutes=2)
    assert sorted(site.scheduler.ended) == ["claim-gone", "run-deleted", "run-killed", "run-over"]
    assert not list(site.root.glob("var/draft/run-*/job.json"))
    assert (site.root / "var" / "draft" / "waited-for.partial" / "job.json").exists()
    site.tick(minutes=60)
    assert len(site.scheduler.ended) == 4


def test_a_job_that_is_claimed_again_is_no_orphan_and_its_minutes_begin_anew(site: Site):
    site.add_job("a", site.add_run(), alive=False)
    site.tick()
    site.scheduler.jobs.clear()
    site.add_job("a", site.add_run())
    site.tick(minutes=60)
    site.scheduler.jobs.clear()
    site.add_job("a", site.add_run(), alive=False)
    site.tick()
    site.tick(minutes=9)
    assert site.scheduler.ended == []


def test_a_scheduler_that_is_silent_for_a_while_does_not_begin_the_minutes_anew(site: Site):
    site.add_job("a", "gone")
    site.tick()
    site.scheduler.is_silent = True
    site.tick(minutes=5)
    site.scheduler.is_silent = False
    site.tick(minutes=6)
    assert site.scheduler.ended == ["a"]


def test_it_is_on_where_jobs_live_in_a_scheduler_and_knows_those_of_targets(site: Site):
    assert make_orphan_sensor(site.registry).default_status is dg.DefaultSensorStatus.RUNNING
    (site.root / "deployment.yaml").write_text("var: var\n")
    assert make_orphan_sensor(site.registry).default_status is dg.DefaultSensorStatus.STOPPED
    assert list_scheduler_specs(site.registry) == []
    (site.root / "deployment.yaml").write_text("launcher: {programs: {train: {kind: toy, root: x}}}\n")
    assert make_orphan_sensor(site.registry).default_status is dg.DefaultSensorStatus.RUNNING
    (site.root / "deployment.yaml").write_text("var: var\n")
    target = "model: m\ndataset: d\nlauncher: {programs: {train: {kind: toy, root: y}}}\n"
    (site.root / "targets" / "t.yaml").write_text(target)
    (site.root / "targets" / "broken.yaml").write_text("model: [\n")
    assert [spec.root for spec in list_scheduler_specs(site.registry)] == ["y"]
