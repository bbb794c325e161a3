"""Runs whose process was killed: their steps end, and what they held is given back.

Dagster's daemon ends runs that it started itself. A run that a terminal or CI started has nobody who looks after it: when
its process is killed, its steps would go on unwatched, and its pool slots would stay taken, so that every later run
waits for them for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import dagster as dg
import psutil
from dagster._core.storage.event_log.sqlite import SqliteEventLogStorage

from resources.process_tree import lives

_SAYS_A_PID = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.STEP_WORKER_STARTED}
_CLOCK_SLACK_S = 2.0
_LOOK_INTERVAL_S = 0.2


def end_with_run_process() -> None:
    """From now on, the end of the process that runs the run interrupts this step, as the run's cancellation would.

    For the process of a step, which is a child of the run's; does nothing elsewhere. The step then has its launcher's
    grace to end its job, and a further `SIGINT`, or the grace's end, leaves nothing of it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not any(thread.name == _watch.__name__ for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent,), name=_watch.__name__, daemon=True).start()


def _watch(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def release_dead_runs(instance: dg.DagsterInstance, wait_s: float = 30.0) -> list[str]:
    """Mark runs that hold pool slots as failed if their process is gone, and free the slots. Returns their ids.

    Waits up to `wait_s` for their steps, which are ending: the slot stands for a GPU that they may still use. Looks at
    process ids, so only where Dagster's own storage is on this machine (SQLite); elsewhere Dagster's daemon does it.
    """
    storage = instance.event_log_storage
    if not isinstance(storage, SqliteEventLogStorage):
        return []
    deadline = time.monotonic() + wait_s
    released = []
    for run_id in sorted(storage.get_concurrency_run_ids()):
        run = instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            processes = _Processes(instance, run_id)
            if not processes.run_is_dead():
                continue
            while processes.any_alive() and time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
            if processes.any_alive():
                continue
            instance.report_run_failed(run, "The process of this run was killed. Run the job again: it continues.")
        storage.free_concurrency_slots_for_run(run_id)
        released.append(run_id)
    return released


class _Processes:
    """The processes that a run's events name: the run's own, first, and those of its steps."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self._all = list(_named_processes(instance, run_id))

    def run_is_dead(self) -> bool:
        """A run that has named no process yet is starting, not dead."""
        return bool(self._all) and self._all[0] is None

    def any_alive(self) -> bool:
        return any(process is not None and lives(process) for process in self._all)


def _named_processes(instance: dg.DagsterInstance, run_id: str) -> Iterator[psutil.Process | None]:
    """One for each event that names a pid; None for one that has ended, also when another has its pid by now."""
    for entry in instance.all_logs(run_id, of_type=_SAYS_A_PID):
        data = entry.dagster_event.event_specific_data
        pid = data.metadata.get("pid") if data is not None else None
        if pid is None:
            continue
        try:
            process = psutil.Process(int(str(pid.value)))
            yield process if process.create_time() < entry.timestamp + _CLOCK_SLACK_S and lives(process) else None
        except psutil.Error:
            yield None
