"""Renewal of task leases by one thread: a batch may take longer than a lease lasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import DraftworksError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.tasks import TaskLease

log = logging.getLogger(__name__)


class LeaseKeeper:
    """The leases of a worker that are renewed while `renewing` is open."""

    def __init__(self, controller: DataFlowController) -> None:
        self._controller = controller
        self._lock = threading.Lock()
        self._leases: dict[str, TaskLease] = {}

    def follow(self, controller: DataFlowController) -> None:
        """Renew the leases that are added from now on with another controller; none of the other one may be left."""
        self._controller = controller

    def add(self, lease: TaskLease) -> None:
        with self._lock:
            self._leases[lease.task.task_id] = lease

    def drop(self, lease: TaskLease) -> None:
        with self._lock:
            self._leases.pop(lease.task.task_id, None)

    @property
    def leases(self) -> list[TaskLease]:
        """The leases that were added and not dropped."""
        with self._lock:
            return list(self._leases.values())

    @contextmanager
    def renewing(self) -> Iterator[None]:
        over = threading.Event()

        def renew() -> None:
            block_stop_signals()
            while not over.wait(self._controller.lease_s / 3):
                try:
                    if leases := self.leases:
                        self._controller.renew_leases(leases)
                except DraftworksError as error:  # the next attempt may come in time
                    log.warning("leases of tasks could not be renewed: %s", error)

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
