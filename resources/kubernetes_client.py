"""The calls to a Kubernetes API server that the launcher needs, as JSON; errors carry the server's own words.

The official client is imported when a connection is made: it is an extra.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.launchers import KubernetesLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from resources.kubernetes_manifest import GROUP, MANAGED_BY, MANAGER, PLURAL, VERSION

_TIMEOUT_S = (5, 30)
"""To connect, and for the answer."""
_WATCH_S = 60
"""Seconds after which the server ends a watch, which is then begun again."""
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CRD_HINT = "Is Kubeflow Trainer 2.2 or later installed there?"


class ApiError(LauncherError):
    """The API server refused a call, or could not be reached.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        words: the server's.
    """

    def __init__(self, message: str, status: int, words: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later: no answer, too many calls, or an error inside the server."""
        return self.status in (0, 429) or self.status >= 500


@dataclass(frozen=True)
class Listing:
    """Objects of one kind, and the version of the collection from which a watch goes on."""

    items: list[dict[str, Any]]
    version: str


@dataclass(frozen=True)
class Change:
    """An event of a watch: ADDED, MODIFIED or DELETED, and the object."""

    kind: str
    item: dict[str, Any]


class KubernetesApi:
    """Calls on TrainJobs and their pods in one namespace."""

    def __init__(self, spec: KubernetesLauncherSpec) -> None:
        client = import_client()
        configuration, namespace = client.Configuration(), spec.namespace
        try:
            _load(spec, configuration)
            namespace = namespace or _find_namespace(spec)
        except _broken_files() as error:
            place = spec.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            words = " ".join(str(error).split())
            raise ConfigError(f"launcher.kubeconfig: {place} cannot be used: {words}") from None
        configuration.retries = 1
        api = client.ApiClient(configuration)
        self.server = configuration.host
        self.namespace = namespace
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    def get_job(self, name: str) -> dict[str, Any] | None:
        """Return a TrainJob; None if there is none of this name."""
        try:
            return self._call(f"get TrainJob {name}", self._custom.get_namespaced_custom_object, *self._jobs, name)
        except ApiError as error:
            if error.status == 404 and not _is_unknown_kind(error):
                return None
            raise

    def create_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a TrainJob; a field that its schema does not have is an error."""
        name = manifest["metadata"]["name"]
        create = self._custom.create_namespaced_custom_object
        return self._call(f"create TrainJob {name}", create, *self._jobs, manifest, field_validation="Strict")

    def delete_job(self, name: str, uid: str) -> bool:
        """Delete this very TrainJob, once all that belongs to it is gone; False if it is gone already."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        delete = self._custom.delete_namespaced_custom_object
        try:
            self._call(f"delete TrainJob {name}", delete, *self._jobs, name, body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return False
        return True

    def get_runtime(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return the training runtime; None if this user may not read it. Raises ConfigError if there is none."""
        place = (GROUP, VERSION, self.namespace, "trainingruntimes", name)
        get = self._custom.get_namespaced_custom_object
        if kind == "ClusterTrainingRuntime":
            place, get = (GROUP, VERSION, "clustertrainingruntimes", name), self._custom.get_cluster_custom_object
        try:
            return self._call(f"get {kind} {name}", get, *place)
        except ApiError as error:
            if error.status == 404:
                hint = _CRD_HINT if _is_unknown_kind(error) else "deploy/kubernetes/training-runtime.yaml is one."
                raise ConfigError(f"launcher.runtime: {self.server} has no {kind} {name}. {hint}") from error
            if error.status == 403:
                return None
            raise

    def list_jobs(self, name: str | None = None) -> Listing:
        """List all TrainJobs of Draftworks, or the one of a name."""
        select = self._select_jobs(name)
        answer = self._call("list TrainJobs", self._custom.list_namespaced_custom_object, *self._jobs, **select)
        return _read_listing(answer)

    def list_pods(self, name: str) -> Listing:
        """List the pods of a TrainJob."""
        select = {"label_selector": f"{_JOBSET}={name}"}
        return _read_listing(self._call("list pods", self._core.list_namespaced_pod, self.namespace, **select))

    def delete_pod(self, name: str, grace_s: int) -> None:
        """Delete a pod, or shorten the grace of one that is being deleted."""
        body = {"gracePeriodSeconds": grace_s}
        try:
            self._call(f"delete pod {name}", self._core.delete_namespaced_pod, name, self.namespace, body=body)
        except ApiError as error:
            if error.status != 404:
                raise

    def watch_jobs(self, name: str, version: str) -> Iterator[Change]:
        """Yield the changes of a TrainJob after a version of the collection, until the server ends the watch.

        Raises ApiError with status 410 if the server has forgotten that version: list again.
        """
        list_ = self._custom.list_namespaced_custom_object
        return self._watch("watch TrainJobs", version, list_, *self._jobs, **self._select_jobs(name))

    def watch_pods(self, name: str, version: str) -> Iterator[Change]:
        """Yield the changes of a TrainJob's pods, as `watch_jobs`."""
        select = {"label_selector": f"{_JOBSET}={name}"}
        return self._watch("watch pods", version, self._core.list_namespaced_pod, self.namespace, **select)

    @property
    def _jobs(self) -> tuple[str, str, str, str]:
        return (GROUP, VERSION, self.namespace, PLURAL)

    def _select_jobs(self, name: str | None) -> dict[str, str]:
        ours = {"label_selector": f"{MANAGED_BY}={MANAGER}"}
        return ours if name is None else {"field_selector": f"metadata.name={name}"}

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the answer as JSON: the models of the client refuse objects of other versions."""
        answer = self._send(what, function, *arguments, **options)
        return json.loads(answer.data)

    def _send(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return function(*arguments, _preload_content=False, **{"_request_timeout": _TIMEOUT_S, **options})
        except ApiException as error:
            raise self._explain(what, error.status or 0, _read_words(error)) from None
        except (HTTPError, OSError) as error:
            raise self._explain(what, 0, str(error)) from None

    def _watch(
        self, what: str, version: str, function: Callable[..., Any], *arguments: Any, **select: str
    ) -> Iterator[Change]:
        from urllib3.exceptions import HTTPError

        options = {"watch": True, "timeout_seconds": _WATCH_S, "_request_timeout": (_TIMEOUT_S[0], _WATCH_S + 30)}
        answer = self._send(what, function, *arguments, resource_version=version, **options, **select)
        try:
            for line in _split_lines(answer.stream(amt=None, decode_content=False)):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise self._explain(what, status.get("code") or 0, status.get("message") or "")
                if event["type"] != "BOOKMARK":
                    yield Change(event["type"], event["object"])
        except (HTTPError, OSError, ValueError) as error:
            raise self._explain(what, 0, str(error)) from None
        finally:
            answer.close()

    def _explain(self, what: str, status: int, words: str) -> ApiError:
        start = f"{self.server}, namespace {self.namespace}: cannot {what}: "
        if status == 0:
            return ApiError(f"{start}the API server cannot be reached: {words}", status, words)
        hint = {
            401: " Renew the credentials of the kubeconfig.",
            403: " deploy/kubernetes/access.yaml has what the launcher needs.",
        }.get(status, "")
        if status == 404 and _says_unknown_kind(words):
            hint = f" {_CRD_HINT}"
        return ApiError(f"{start}{words} (status {status}).{hint}", status, words)


def import_client() -> Any:
    """Return the module `kubernetes.client`. Raises ConfigError if the extra is not installed."""
    try:
        from kubernetes import client
    except ImportError as error:
        raise ConfigError(
            f"launcher.kind: kubernetes needs the official client ({error}). Install it: pip install -e '.[kubernetes]'"
        ) from None
    return client


def _load(spec: KubernetesLauncherSpec, configuration: Any) -> None:
    """Set address and credentials of the API server that the settings name."""
    from kubernetes import config

    if _is_inside(spec):
        config.load_incluster_config(client_configuration=configuration)
    else:
        config.load_kube_config(spec.kubeconfig, spec.context, configuration, persist_config=False)


def _broken_files() -> tuple[type[Exception], ...]:
    """Return the errors of the client for missing or broken configuration files."""
    from kubernetes.config.config_exception import ConfigException
    from yaml import YAMLError

    return (ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError)


def _is_inside(spec: KubernetesLauncherSpec) -> bool:
    """Return whether the service account of the pod that this process runs in is to be used."""
    chosen = spec.kubeconfig or spec.context or os.environ.get("KUBECONFIG")
    return not chosen and "KUBERNETES_SERVICE_HOST" in os.environ and _NAMESPACE_OF_POD.exists()


def _find_namespace(spec: KubernetesLauncherSpec) -> str:
    if _is_inside(spec):
        return _NAMESPACE_OF_POD.read_text().strip()
    from kubernetes import config

    listed: Any = config.list_kube_config_contexts(spec.kubeconfig)
    contexts, current = listed
    chosen = next((each for each in contexts if each["name"] == spec.context), current)
    return chosen["context"].get("namespace") or "default"


def _read_listing(answer: dict[str, Any]) -> Listing:
    return Listing(answer["items"], answer["metadata"]["resourceVersion"])


def _read_words(error: Any) -> str:
    """Return the message of a refusal: from the Status object, or else the body."""
    body = error.body.decode("utf-8", errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(body.split())[:300] or str(error.reason)


def _is_unknown_kind(error: ApiError) -> bool:
    return _says_unknown_kind(error.words)


def _says_unknown_kind(words: str) -> bool:
    """Return whether a 404 is about the kind of object, which is not installed, and not about one object."""
    return "page not found" in words or "could not find the requested resource" in words


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)
