"""Leases that a thread renews: of tasks, since a batch may take longer than a lease lasts; of a consumer's identity."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import DraftworksError, StoreError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import TaskLease

log = logging.getLogger(__name__)


class ConsumerLease:
    """The identity of a consumer, renewed by a thread. `hold_consumer` makes one."""

    def __init__(self, controller: DataFlowController) -> None:
        self._controller = controller
        self._held_until = time.monotonic() + controller.consumer_lease_s
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="consumer-heartbeat", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Raise StoreError if the identity has gone to another process: this one has to stop training.

        Where the heartbeat is late, as after an absence of the control server, it is taken again, if nobody else has.
        """
        if not self._lost and time.monotonic() > self._held_until:
            self._take_again()
        if self._lost:
            raise StoreError(
                f"consumer {self._controller.consumer} of run {self._controller.run_id} has lost its identity: "
                f"{self._lost}"
            )

    def _take_again(self) -> None:
        began = time.monotonic()
        try:
            self._controller.hold_consumer()
        except DraftworksError as error:
            self._lost = str(error)
        else:
            self._held_until = began + self._controller.consumer_lease_s

    def end(self) -> None:
        """Stop the heartbeat and give the identity back."""
        self._stop.set()
        self._thread.join()
        try:
            self._controller.release_consumer()
        except DraftworksError as error:
            log.warning("the identity of consumer %s ends by itself: %s", self._controller.consumer, error)

    def _renew(self) -> None:
        block_stop_signals()
        lease_s = self._controller.consumer_lease_s
        while not self._stop.wait(lease_s / 4):
            began = time.monotonic()
            try:
                self._controller.hold_consumer()
            except DraftworksError as error:
                if began > self._held_until:
                    self._lost = str(error)
                    return
                log.warning("heartbeat of consumer %s: %s", self._controller.consumer, error)
            else:
                self._held_until = began + lease_s


@contextmanager
def hold_consumer(controller: DataFlowController, wait_s: float | None = None) -> Iterator[ConsumerLease]:
    """Hold the controller's consumer identity in the block.

    Args:
        wait_s: how long to wait for another holder to end; by default as long as the hold of a killed process lasts.

    Raises:
        StoreError: another process holds the identity and keeps it.
    """
    wait_s = controller.consumer_lease_s + 1 if wait_s is None else wait_s
    until = time.monotonic() + wait_s
    while True:
        try:
            controller.hold_consumer()
            break
        except StoreError as error:
            if time.monotonic() >= until:
                raise
            log.info("waiting for up to %.0f s: %s", until - time.monotonic(), error)
            time.sleep(min(1.0, controller.consumer_lease_s / 8))
    lease = ConsumerLease(controller)
    try:
        yield lease
    finally:
        lease.end()


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
