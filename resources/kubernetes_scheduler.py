"""Jobs as Kubeflow TrainJobs of a Kubernetes cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

from draftworks.config.launchers import KubernetesLauncherSpec, LauncherSpec
from draftworks.errors import ConfigError, LauncherError
from resources.kubernetes_client import ApiError, KubernetesApi
from resources.kubernetes_manifest import (
    CLAIM,
    MANAGED_BY,
    MANAGER,
    choose_runtime,
    require_runtime,
    require_volume,
    write_environment,
    write_train_job,
)
from resources.kubernetes_state import (
    JobWatch,
    count_nodes,
    count_room,
    describe_obstacle,
    find_age_s,
    has_ended,
    make_id,
    read_state,
)
from resources.scheduler import JobRequest, Scheduler, SeenJob
from resources.torch_job import JobState, TorchJob

_CONFLICT = 409
_REFUSALS = {400, 403, 404, 422}
"""Answers to a new TrainJob that a person can do something about."""
_INTERVAL_S = 0.25
_SETTLE_S = 1.0
"""Seconds after a failure was first seen in which the events of the pods, which come by another way, arrive."""
_SILENCE_S = 20.0
"""Seconds without an answer of the API server after which a look at a job is an error: shorter gaps are usual."""
_CLEANUP_S = 120.0
"""Seconds beyond the grace in which a deleted TrainJob and its pods have to be gone."""


class _Place(NamedTuple):
    """The parts of a job's id."""

    namespace: str
    name: str
    uid: str


class KubernetesScheduler(Scheduler):
    """TrainJobs in one namespace. Before a job exists it makes three calls: find it, read the runtime, create it."""

    engine = "kubernetes"

    def __init__(self, spec: KubernetesLauncherSpec, silence_s: float = _SILENCE_S) -> None:
        self._spec = spec
        self._silence_s = silence_s
        self._api = KubernetesApi(spec)
        self._watches: dict[str, JobWatch] = {}
        self._ended: dict[str, SeenJob] = {}
        self._failed_at: dict[str, float] = {}
        self._room: dict[str, int] = {}
        self._checked_runtimes: set[str] = set()
        self.has_arrays = spec.nodes == 1  # the index of a pod says either which node it is or which copy

    def create(self, request: JobRequest) -> str:
        """Create the TrainJob. One of the same name with the same claim that has not ended is returned as it is."""
        spec = self._spec
        nodes = None if request.min_nodes is None else self._room.pop(request.name, None)
        manifest = write_train_job(request, spec, self._api.namespace, nodes)
        self._check_runtime(request.job)
        write_environment(request, spec)
        deadline = time.monotonic() + spec.grace_s + _CLEANUP_S
        while time.monotonic() < deadline:
            try:
                return make_id(self._api.create_job(manifest))
            except ApiError as error:
                if error.status in _REFUSALS:
                    raise ConfigError(str(error)) from error
                # A call without an answer may have made the job all the same.
                if error.status != _CONFLICT and not (error.is_passing and self._api.get_job(request.name)):
                    raise
            if (existing := self._make_room(request)) is not None:
                return make_id(existing)
        raise LauncherError(f"{self._api.server}: a TrainJob {request.name} is being deleted and does not go away")

    def check(self, request: JobRequest) -> None:
        require_volume(request, self._spec)
        self._check_runtime(request.job)
        self._api.list_jobs(request.name)

    def find(self, name: str) -> SeenJob | None:
        found = self._api.get_job(name)
        if found is None or not _is_ours(found):
            return None
        return self._read(found)

    def look(self, id: str) -> SeenJob | None:
        """Return a job as the watches have it; the first look at a job, and one at an ended job, reads it."""
        if id in self._ended:
            return self._ended[id]
        watch = self._watches.get(id)
        if watch is None:
            place = _parse(id)
            found = self._api.get_job(place.name)
            if found is None or found["metadata"]["uid"] != place.uid:
                return None
            if has_ended(found):
                return self._read(found)
            watch = self._watches[id] = JobWatch(self._api, found)
        seen = watch.read()
        if seen.state.is_final:
            return self._settle(id, seen)
        if watch.silence_s > self._silence_s and watch.error is not None:
            raise watch.error
        return self._give_up(id, watch) or seen

    def end(self, id: str, grace_s: float) -> None:
        """Delete the TrainJob and wait until it and its pods are gone.

        A pod's grace is its runtime's `terminationGracePeriodSeconds`; a shorter one is asked for.
        """
        place = _parse(id)
        self._forget(id)
        found = self._api.get_job(place.name)
        if found is None or found["metadata"]["uid"] != place.uid or has_ended(found):
            return
        self._api.delete_job(place.name, place.uid)
        deadline = time.monotonic() + grace_s + _CLEANUP_S
        shortened: set[str] = set()
        while (pods := self._api.list_pods(place.name).items) or self._exists(place):
            for pod in pods:
                self._shorten(pod, grace_s, shortened)
            if time.monotonic() > deadline:
                left = ", ".join(pod["metadata"]["name"] for pod in pods) or "no pod"
                raise LauncherError(
                    f"TrainJob {place.name} was deleted and is not gone: {left} left in {place.namespace}"
                )
            time.sleep(_INTERVAL_S)

    def list(self) -> list[SeenJob]:
        """Return the jobs that have not ended; delete those that ended `keep_ended_hours` ago."""
        jobs = self._api.list_jobs().items
        for each in jobs:
            if find_age_s(each) > 3600 * self._spec.keep_ended_hours:
                self._api.delete_job(each["metadata"]["name"], each["metadata"]["uid"])
        return [read_state(each, ()) for each in jobs if not has_ended(each)]

    def restart(self, id: str, copy: int) -> None:
        """Do nothing: the cluster starts a dead copy again."""

    def close(self) -> None:
        """Stop following jobs; a later look follows again."""
        for id in tuple(self._watches):
            self._forget(id)

    def _check_runtime(self, job: TorchJob) -> None:
        """Raise ConfigError, the first time, if the job's training runtime is missing or does not fit."""
        name = choose_runtime(job, self._spec)
        if name not in self._checked_runtimes:
            runtime = self._api.get_runtime(self._spec.runtime_kind, name)
            if runtime is not None:
                require_runtime(runtime, self._spec.grace_s, job.copies)
            self._checked_runtimes.add(name)

    def _make_room(self, request: JobRequest) -> dict[str, Any] | None:
        """Return the TrainJob that has a request's name if it is this very job; else delete it if it has ended.

        Raises:
            LauncherError: it is another job that has not ended.
        """
        existing = self._api.get_job(request.name)
        if existing is None or existing["metadata"].get("deletionTimestamp"):
            time.sleep(_INTERVAL_S)
        elif has_ended(existing) and _is_ours(existing):
            self._api.delete_job(request.name, existing["metadata"]["uid"])
        elif _is_ours(existing) and existing["metadata"].get("annotations", {}).get(CLAIM) == str(request.claim):
            return existing
        else:
            raise LauncherError(
                f"{self._api.server}, namespace {self._api.namespace}: there is a TrainJob {request.name} of someone else "
                f"(its claim is {existing['metadata'].get('annotations', {}).get(CLAIM)}). Delete or rename it"
            )
        return None

    def _give_up(self, id: str, watch: JobWatch) -> SeenJob | None:
        """End a job of which a pod cannot start, and return its failure; None for any other job.

        One that may run on fewer nodes is lost, and created again for those that there is room for.
        """
        patience_s, pods, job = self._spec.start_patience_s, watch.pods, watch.train_job
        reason = next(filter(None, (describe_obstacle(pod, patience_s) for pod in pods)), "")
        room = None if reason else count_room(job, pods, patience_s)
        if room is not None:
            reason = f"there is room for {room} of its {count_nodes(job)} nodes"
            self._room[job["metadata"]["name"]] = room
        if not reason:
            return None
        self.end(id, self._spec.grace_s)
        self._ended[id] = replace(watch.read(), state=JobState.FAILED, reason=reason, lost=room is not None)
        return self._ended[id]

    def _settle(self, id: str, seen: SeenJob) -> SeenJob:
        """Return an ended job once all is known about its end; until then it still runs."""
        since = self._failed_at.setdefault(id, time.monotonic())
        if seen.state is JobState.FAILED and time.monotonic() - since < _SETTLE_S:
            return replace(seen, state=JobState.RUNNING, lost=False)
        self._forget(id)
        self._ended[id] = seen
        return seen

    def _read(self, found: dict[str, Any]) -> SeenJob:
        """Return the job of a TrainJob that was just read, with its pods."""
        return read_state(found, self._api.list_pods(found["metadata"]["name"]).items)

    def _forget(self, id: str) -> None:
        watch = self._watches.pop(id, None)
        if watch is not None:
            watch.close()

    def _shorten(self, pod: dict[str, Any], grace_s: float, shortened: set[str]) -> None:
        metadata = pod["metadata"]
        too_long = (metadata.get("deletionGracePeriodSeconds") or 0) > grace_s
        if metadata.get("deletionTimestamp") and too_long and metadata["uid"] not in shortened:
            shortened.add(metadata["uid"])
            self._api.delete_pod(metadata["name"], max(1, int(grace_s)))

    def _exists(self, place: _Place) -> bool:
        found = self._api.get_job(place.name)
        return found is not None and found["metadata"]["uid"] == place.uid


def make_scheduler(spec: LauncherSpec) -> KubernetesScheduler:
    """Return the scheduler of a deployment's settings.

    Raises:
        ConfigError: the client is not installed, or the kubeconfig cannot be used.
    """
    if not isinstance(spec, KubernetesLauncherSpec):
        raise TypeError(f"settings of kind {spec.kind}")
    return KubernetesScheduler(spec)


def _parse(id: str) -> _Place:
    return _Place(*id.split("/"))


def _is_ours(train_job: dict[str, Any]) -> bool:
    return train_job["metadata"].get("labels", {}).get(MANAGED_BY) == MANAGER
