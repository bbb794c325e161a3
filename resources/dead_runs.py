"""Runs whose process was killed: ends their steps and releases their pool slots.

Dagster's daemon monitors only runs that it started itself, not those that a terminal or CI started. If the process of
such a run is killed, its steps would continue and its pool slots would stay taken, so every later run would wait for
ever.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import dagster as dg
import psutil

from resources.dagster_internals import PRELOADED, EngineEventData
from resources.job_claims import JobClaim, is_claim_alive
from resources.process_tree import RunProcess, is_alive

TAG = ".dagster/draftworks_run_process"
"""Of the process of a run. Dagster's UI does not show tags that begin so, which are for programs."""
_OLD_TAG = "draftworks/run_process"
"""As runs have it that began before it was hidden."""
JOB_TAG = "draftworks/job."
"""Begins the tags of a run that name the claims of its jobs in schedulers, see `resources.job_claims`."""
_SAYS_A_PID = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.STEP_WORKER_STARTED}
_CLOCK_SLACK_S = 2.0
_LOOK_INTERVAL_S = 0.2


def end_with_run_process(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> None:
    """Interrupt this step when the process of its run ends, as a cancellation of the run would.

    For the process of a step, which is a child of the run's. The step then has its launcher's grace to end its job, and
    a further `SIGINT`, or the grace's end, leaves nothing of it; a job in a scheduler is left there. The run is tagged with its process, so that others can
    tell whether it lives.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not any(thread.name == _watch.__name__ for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent,), name=_watch.__name__, daemon=True).start()
    run = context.run
    if find_run_process(run) is None:
        with suppress(psutil.Error):  # the parent has just ended, and this step will
            mine = RunProcess.of(
                run.run_id, parent.pid if parent is not None and parent.pid is not None else os.getpid()
            )
            context.instance.add_run_tags(run.run_id, {TAG: mine.to_tag()})


def find_run_process(run: dg.DagsterRun) -> RunProcess | None:
    """Return the process that a run's tag names; None if it has none, or only that of the run that it retries."""
    return RunProcess.from_tag(run.run_id, run.tags.get(TAG) or run.tags.get(_OLD_TAG))


def has_run_process_ended() -> bool:
    """Whether the process of this step's run has ended before the step; False in the run's own process."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _watch(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


@dataclass(frozen=True)
class DeadRuns:
    """Ids of runs that were found dead, and of those that keep their pool slots.

    Attributes:
        unknown: unfinished runs whose state is unknown here.
        kept: dead runs with a job that lives on in a scheduler.
    """

    released: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def release_dead_runs(
    instance: dg.DagsterInstance,
    wait_s: float = 30.0,
    takes: Callable[[JobClaim], bool] = lambda claim: False,
    ended_for_s: float = 0.0,
) -> DeadRuns:
    """Mark runs that hold pool slots as failed if their process is gone, and free the slots.

    Waits up to `wait_s` for their steps, which are ending: the slot stands for a GPU that they may still use. A run of
    another machine or container, or one that has not said where it runs, is left to those who can see it. Works with
    every storage that has pools.

    The slots of a run stay taken while a job that it claimed lives on in a scheduler.

    Args:
        takes: whether the caller's run is about to wait for a claimed job itself: it needs the slot for that.
        ended_for_s: how long ago a finished run must have ended, since its processes may end a little later.
    """
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return DeadRuns()
    deadline = time.monotonic() + wait_s
    released, unknown, kept = [], [], []
    for run_id in sorted(storage.get_concurrency_run_ids()):
        record = instance.get_run_record_by_id(run_id)
        run = None if record is None else record.dagster_run
        if record is not None and record.end_time is not None and time.time() - record.end_time < ended_for_s:
            continue
        if run is not None and not run.is_finished:
            process = find_run_process(run)
            dead = None if process is None else process.is_dead()
            if not dead:
                unknown += [run_id] if dead is None else []
                continue
            while (alive := _is_any_alive(instance, run_id)) and time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
            if alive:
                continue
        if run is not None and any(not takes(claim) for claim in find_living_jobs(run)):
            kept.append(run_id)
            continue
        if run is not None and not run.is_finished:
            instance.report_run_failed(run, "The process of this run was killed. Run the job again: it continues.")
        storage.free_concurrency_slots_for_run(run_id)
        released.append(run_id)
    return DeadRuns(tuple(released), tuple(unknown), tuple(kept))


def find_living_jobs(run: dg.DagsterRun) -> list[JobClaim]:
    """Return the claims of a run whose jobs live in a scheduler, those whose scheduler cannot be asked included."""
    claims = [Path(path) for tag, path in run.tags.items() if tag.startswith(JOB_TAG)]
    found = [JobClaim.read(path) for path in claims if is_claim_alive(path, run.run_id)]
    return [claim for claim in found if claim is not None]


def _is_any_alive(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a process that the run's events name is alive."""
    return any(process is not None and is_alive(process) for process in _find_named_processes(instance, run_id))


def _find_named_processes(instance: dg.DagsterInstance, run_id: str) -> Iterator[psutil.Process | None]:
    """Yield the process of each event that names a pid; None if it has ended, also if its pid is in use again."""
    for entry in instance.all_logs(run_id, of_type=_SAYS_A_PID):
        data = entry.get_dagster_event().event_specific_data
        pid = data.metadata.get("pid") if isinstance(data, EngineEventData) else None
        if pid is None:
            continue
        try:
            process = psutil.Process(int(str(pid.value)))
            yield process if process.create_time() < entry.timestamp + _CLOCK_SLACK_S and is_alive(process) else None
        except psutil.Error:
            yield None


CODE_LOCATION = "spec_assets.code_location"


def list_preloaded(module: str) -> Sequence[str]:
    """Return the modules that a step's process has imported from the start. Importing it would otherwise take half
    the time of a step
    whose result exists.

    Args:
        module: the one that holds the definitions, or makes them.
    """
    return (*PRELOADED, module)


def start_ahead(module: str) -> None:
    """Start that process now, so that it imports while this one does; Dagster would start it with the first step."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(list_preloaded(module)))
    forkserver.ensure_running()
