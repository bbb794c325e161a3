"""Keeps what the API server says of one TrainJob and its pods current, by a list and a watch of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from draftworks.errors import LauncherError
from resources.kubernetes_client import ApiError, Change, KubernetesApi, Listing
from resources.kubernetes_state import describe_loss, has_ended, has_failed, is_suspended, read_state
from resources.scheduler import SeenJob
from resources.torch_job import JobState

_GONE = 410
_RETRY_S = (0.5, 15.0)
"""Seconds before a failed call is made again: at first, and at most."""


class JobWatch:
    """One TrainJob and its pods, followed by two threads.

    Pods are watched because they say what the TrainJob does not: which of them ended first, and whether it failed or the
    cluster, or a person, ended it.
    """

    def __init__(self, api: KubernetesApi, train_job: dict[str, Any]) -> None:
        """Start to follow a TrainJob that was read a moment ago."""
        self._api = api
        self._name = train_job["metadata"]["name"]
        self._uid = train_job["metadata"]["uid"]
        self._lock = threading.Lock()
        self._job = train_job
        self._is_gone = False
        self._pods: dict[str, dict[str, Any]] = {}
        self._loss = ""
        self._silent_since: dict[str, float] = {}
        self._error: LauncherError | None = None
        self._over = threading.Event()
        self._replace_pods(api.list_pods(self._name).items)
        for what, follow in (("job", self._follow_job), ("pods", self._follow_pods)):
            threading.Thread(target=follow, name=f"watch-{what}-{self._name}", daemon=True).start()

    def read(self) -> SeenJob:
        """Return the job as it was last seen. One whose TrainJob was deleted is cancelled once its pods are gone."""
        with self._lock:
            seen = read_state(self._job, list(self._pods.values()), self._loss)
            if not self._is_gone or seen.state.is_final:
                return seen
            state = JobState.RUNNING if self._pods else JobState.CANCELLED
            return replace(seen, state=state, reason=f"TrainJob {self._name} was deleted")

    @property
    def train_job(self) -> dict[str, Any]:
        """The TrainJob as it was last seen."""
        with self._lock:
            return self._job

    @property
    def pods(self) -> list[dict[str, Any]]:
        """The pods as they were last seen."""
        with self._lock:
            return list(self._pods.values())

    @property
    def silence_s(self) -> float:
        """Seconds for which the API server has not answered; 0 while it does."""
        with self._lock:
            return time.monotonic() - min(self._silent_since.values()) if self._silent_since else 0.0

    @property
    def error(self) -> LauncherError | None:
        """The last call's error."""
        return self._error

    def close(self) -> None:
        """Let the threads end with their current calls."""
        self._over.set()

    def _follow_job(self) -> None:
        def replace(items: list[dict[str, Any]]) -> None:
            self._set_job(next((item for item in items if item["metadata"]["uid"] == self._uid), None))

        def change(event: Change) -> None:
            if event.item["metadata"]["uid"] == self._uid:
                self._set_job(None if event.kind == "DELETED" else event.item)

        api = self._api
        self._follow("job", lambda: api.list_jobs(self._name), lambda v: api.watch_jobs(self._name, v), replace, change)

    def _follow_pods(self) -> None:
        api = self._api
        self._follow(
            "pods",
            lambda: api.list_pods(self._name),
            lambda version: api.watch_pods(self._name, version),
            self._replace_pods,
            self._change_pod,
        )

    def _follow(
        self,
        what: str,
        list_: Callable[[], Listing],
        watch: Callable[[str], Iterator[Change]],
        replace: Callable[[list[dict[str, Any]]], None],
        change: Callable[[Change], None],
    ) -> None:
        """List, then watch from that version, for as long as the server knows it; after an error begin again."""
        wait_s, version = _RETRY_S[0], ""
        while not self._over.is_set():
            try:
                if not version:
                    listing = list_()
                    replace(listing.items)
                    version = listing.version
                self._note_answer(what)
                wait_s, begun = _RETRY_S[0], time.monotonic()
                for event in watch(version):
                    version = event.item["metadata"]["resourceVersion"]
                    change(event)
                    self._note_answer(what)
                    if self._over.is_set():
                        return
                if time.monotonic() - begun < wait_s:  # something between ends watches at once
                    self._over.wait(wait_s)
            except Exception as error:  # whatever it is: a job that nobody follows would seem to run for ever
                version = ""
                if isinstance(error, ApiError) and error.status == _GONE:
                    continue
                words = f"cannot follow TrainJob {self._name}: {type(error).__name__}: {error}"
                self._note_error(what, error if isinstance(error, LauncherError) else LauncherError(words))
                self._over.wait(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])

    def _note_answer(self, what: str) -> None:
        with self._lock:
            self._silent_since.pop(what, None)

    def _note_error(self, what: str, error: LauncherError) -> None:
        with self._lock:
            self._error = error
            self._silent_since.setdefault(what, time.monotonic())

    def _set_job(self, train_job: dict[str, Any] | None) -> None:
        with self._lock:
            self._is_gone = train_job is None
            self._job = train_job or self._job
            if is_suspended(self._job):
                self._loss = ""  # its pods are deleted because it is suspended, and come back

    def _replace_pods(self, items: list[dict[str, Any]]) -> None:
        now = {item["metadata"]["uid"]: item for item in items}
        with self._lock:
            gone = [pod for uid, pod in self._pods.items() if uid not in now]
        for pod in gone:
            self._change_pod(Change("DELETED", pod))
        for pod in items:
            self._change_pod(Change("MODIFIED", pod))

    def _change_pod(self, event: Change) -> None:
        uid = event.item["metadata"]["uid"]
        with self._lock:
            if not self._loss and self._is_up() and not any(map(has_failed, self._pods.values())):
                unfinished = event.item.get("status", {}).get("phase") not in ("Succeeded", "Failed")
                deleted = event.kind == "DELETED" and unfinished
                self._loss = describe_loss(event.item) or (
                    f"pod {event.item['metadata']['name']} was deleted" if deleted else ""
                )
            if event.kind == "DELETED":
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = event.item

    def _is_up(self) -> bool:
        """Whether a pod that ends now is no consequence of what happened to the TrainJob before."""
        job = self._job
        going = self._is_gone or job["metadata"].get("deletionTimestamp")
        return not (going or is_suspended(job) or has_ended(job))
