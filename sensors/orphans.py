"""The sensors that end jobs of schedulers and free pool slots for which no run waits any more."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import dagster as dg

from draftworks.config.launchers import LOCAL, PROGRAMS, LauncherSpec, SchedulerLauncherSpec
from draftworks.errors import DraftworksError
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry
from resources.dead_runs import find_run_process, release_dead_runs
from resources.job_claims import JobClaim
from resources.scheduler import SeenJob, make_scheduler
from resources.workspace import Workspace

INTERVAL_S = 60

log = logging.getLogger(__name__)


def make_orphan_sensor(registry: Registry) -> dg.SensorDefinition:
    """Return the sensor; it is on where jobs of the deployment, or of one of its programs, run in a scheduler."""
    launcher = registry.load_deployment().launcher
    kinds = {launcher.kind, *(own.get("kind", launcher.kind) for own in launcher.programs.values())}
    status = dg.DefaultSensorStatus.STOPPED if kinds == {LOCAL} else dg.DefaultSensorStatus.RUNNING

    @dg.sensor(
        name="orphan_sensor",
        minimum_interval_seconds=INTERVAL_S,
        default_status=status,
        description="Ends jobs of a scheduler that no living run has claimed for `launcher.orphan_minutes`.",
    )
    def end_orphans(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult:
        since: dict[str, float] = json.loads(context.cursor) if context.cursor else {}
        seen_now, words = {}, []
        for spec in list_scheduler_specs(workspace.registry):
            try:
                orphans = find_orphans(context.instance, spec, workspace.var)
                for job in orphans:
                    key = f"{spec.kind} {job.id}"
                    seen_now[key] = since.get(key, time.time())
                    if time.time() - seen_now[key] >= spec.orphan_minutes * 60:
                        end_orphan(spec, job)
                        words.append(f"ended job {job.id} of {spec.kind}, for which no run has waited")
            except DraftworksError as error:
                context.log.warning(str(error))
                seen_now.update({key: at for key, at in since.items() if key.startswith(f"{spec.kind} ")})
        for line in words:
            context.log.info(line)
        return dg.SensorResult(
            skip_reason="; ".join(words) or f"{format_count(len(seen_now), 'job')} without a living run",
            cursor=json.dumps(seen_now),
        )

    return end_orphans


def list_scheduler_specs(registry: Registry) -> list[SchedulerLauncherSpec]:
    """Return the settings of all schedulers that jobs of this deployment run in, one for each that may differ."""
    deployment = registry.load_deployment().launcher
    found: dict[str, LauncherSpec] = {deployment.model_dump_json(): deployment}
    for name in registry.list_targets():
        try:
            target = registry.load_target(name)
        except DraftworksError as error:
            log.warning("target %s: its launcher is unknown: %s", name, error)
            continue
        if target.launcher or deployment.programs:
            for program in PROGRAMS:
                spec = registry.resolve_launcher(target, program)
                found[spec.model_dump_json(exclude={"programs", "nodes", "min_nodes", "time_limit_s", "threads"})] = (
                    spec
                )
    return [spec for spec in found.values() if isinstance(spec, SchedulerLauncherSpec)]


def find_orphans(instance: dg.DagsterInstance, spec: SchedulerLauncherSpec, var: Path) -> list[SeenJob]:
    """Return the jobs of this deployment that no living run waits for; other deployments may use the same scheduler."""
    ours = [job for job in make_scheduler(spec).list() if job.claim is not None and job.claim.is_relative_to(var)]
    return [job for job in ours if job.claim is not None and not is_waited_for(instance, JobClaim.read(job.claim))]


def is_waited_for(instance: dg.DagsterInstance, claim: JobClaim | None) -> bool:
    """Whether the run of a claim may still be alive. A process of another machine counts as alive while its run does."""
    run = None if claim is None else instance.get_run_by_id(claim.owner.run_id)
    if claim is None or run is None or run.is_finished:
        return False
    process = find_run_process(run)
    return not claim.owner.is_dead() and (process is None or not process.is_dead())


def end_orphan(spec: SchedulerLauncherSpec, job: SeenJob) -> None:
    make_scheduler(spec).end(job.id, spec.grace_s)
    claim = None if job.claim is None else JobClaim.read(job.claim)
    if job.claim is not None and claim is not None and claim.name == job.name:
        claim.drop(job.claim)


SLOTS_INTERVAL_S = 30
ENDED_FOR_S = 30.0
"""Seconds after the end of a run in which its processes may still be ending."""


def make_pool_slot_sensor() -> dg.SensorDefinition:
    """Return the sensor. It is on: without it, a killed run would keep its slots until the next run begins."""

    @dg.sensor(
        name="pool_slot_sensor",
        minimum_interval_seconds=SLOTS_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Frees pool slots of runs that have ended or were killed, unless a job of theirs lives in a scheduler.",
    )
    def free_pool_slots(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        found = release_dead_runs(context.instance, wait_s=0.0, ended_for_s=ENDED_FOR_S)
        for run_id in found.released:
            context.log.info(f"the pool slots of run {run_id} are free")
        reason = (
            f"freed the pool slots of {format_count(len(found.released), 'run')}; "
            f"a job of {format_count(len(found.kept), 'run')} lives"
        )
        return dg.SensorResult(skip_reason=reason)

    return free_pool_slots
