"""A stand-in of a Kubernetes API server with Kubeflow Trainer: TrainJobs, their pods and runtimes, over HTTP.

It has what a launcher can trip over: namespaces, RBAC, strict schemas, admission, conflicts, resource versions, watches
that expire with 410, foreground deletion. `fake_kubelet.FakeCluster` runs the pods. Written after the documentation and
source of Kubernetes and Trainer; nothing here was compared with a real cluster.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import yaml

TRAINJOBS, PODS, RUNTIMES = "trainjobs", "pods", "clustertrainingruntimes"
TOKEN = "the-token-of-the-test"
TRAINER = "trainer.kubeflow.org"
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?$"
)
Object = dict[str, Any]


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass(frozen=True)
class Event:
    version: int
    kind: str
    plural: str
    item: Object


@dataclass
class ObjectStore:
    """Objects by kind and name with one version for all writes, as etcd has it, and the events of watches."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    version: int = 100
    forgotten: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def write(self, plural: str, item: Object, kind: str = "MODIFIED") -> Object:
        with self.changed:
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            key = (plural, item["metadata"]["name"])
            if kind == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = item
            self.events.append(Event(self.version, kind, plural, deepcopy(item)))
            self.changed.notify_all()
            return deepcopy(item)

    def get(self, plural: str, name: str) -> Object | None:
        with self.changed:
            return deepcopy(self.objects.get((plural, name)))

    def list(self, plural: str) -> list[Object]:
        with self.changed:
            return [deepcopy(item) for (kind, _), item in self.objects.items() if kind == plural]

    def compact(self) -> None:
        """Forget all events until now: watches from an earlier version are told that it is gone."""
        with self.changed:
            self.forgotten, self.events = self.version, []


class FakeKubernetes:
    """The server's state, and what tests may turn.

    Attributes:
        namespaces: those that exist.
        forbidden: refused as (verb, plural).
        calls: verb, plural and name of every request so far.
        down: whether no request is answered.
        lost_answers: how many of the next creations are done and not answered.
        without_trainer: whether TrainJobs are unknown to the server.
    """

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.namespaces = {"drafts"}
        self.forbidden: set[tuple[str, str]] = set()
        self.calls: list[tuple[str, str, str]] = []
        self.down = False
        self.without_trainer = False
        self.lost_answers = 0
        self.watches = 0
        self._epoch = 0

    def break_watches(self) -> None:
        """Close the connections of all watches."""
        with self.store.changed:
            self._epoch += 1
            self.store.changed.notify_all()

    def answer(self, verb: str, path: str, query: dict[str, str], body: Any, token: str) -> Object:
        """Return the answer to a request that is no watch."""
        plural, name = self.check(verb, path, token)
        if verb == "POST":
            return self._create(plural, body, query, path)
        if name is None:
            items = [item for item in self.store.list(plural) if selects(query, item)]
            return {"kind": "List", "items": items, "metadata": {"resourceVersion": str(self.store.version)}}
        found = self.store.get(plural, name)
        if found is None:
            group = TRAINER if plural != PODS else ""
            raise Refusal(404, "NotFound", f'{".".join(filter(None, (plural, group)))} "{name}" not found')
        return self._delete(plural, found, body or {}) if verb == "DELETE" else found

    def check(self, verb: str, path: str, token: str) -> tuple[str, str | None]:
        """Return kind and name that a path asks for, if the caller may."""
        matched = _PATH.match(path)
        plural, name, namespace = (
            (matched[key] for key in ("plural", "name", "namespace")) if matched else ("", None, None)
        )
        self.calls.append((verb, plural, name or ""))
        if token != f"Bearer {TOKEN}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        if not matched or (self.without_trainer and matched["group"] == TRAINER):
            raise Refusal(404, "", "404 page not found")
        if (verb, plural) in self.forbidden:
            raise Refusal(
                403,
                "Forbidden",
                f'{plural} is forbidden: User "system:serviceaccount:drafts:dagster" cannot {verb.lower()} resource'
                f' "{plural}" in API group "{matched["group"] or ""}" in the namespace "{namespace}"',
            )
        if verb == "POST" and namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
        return plural, name

    def follow(self, plural: str, query: dict[str, str]) -> Iterator[Object]:
        """Yield the events of a watch."""
        position = int(query.get("resourceVersion") or self.store.version)
        deadline, epoch = time.monotonic() + float(query.get("timeoutSeconds", 60)), self._epoch
        self.watches += 1
        while not self.down and epoch == self._epoch and time.monotonic() < deadline:
            with self.store.changed:
                if position < self.store.forgotten:
                    refusal = Refusal(410, "Expired", f"too old resource version: {position} ({self.store.forgotten})")
                    yield {"type": "ERROR", "object": refusal.status}
                    return
                ready = [each for each in self.store.events if each.version > position and each.plural == plural]
                if not ready:
                    self.store.changed.wait(0.1)
            for each in ready:
                position = each.version
                if selects(query, each.item):
                    yield {"type": each.kind, "object": each.item}

    def _create(self, plural: str, body: Object, query: dict[str, str], path: str) -> Object:
        if plural != TRAINJOBS:
            raise Refusal(405, "MethodNotAllowed", f"{plural} are not made by the tests")
        name = body["metadata"]["name"]
        if query.get("fieldValidation") == "Strict" and (unknown := find_unknown_fields(body)):
            fields = ", ".join(f'unknown field "{each}"' for each in unknown)
            raise Refusal(
                400, "BadRequest", f"TrainJob in version v1alpha1 cannot be handled: strict decoding error: {fields}"
            )
        if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63:
            raise Refusal(
                422, "Invalid", f'TrainJob "{name}" is invalid: metadata.name must match RFC 1035 DNS label format'
            )
        if self.store.get(TRAINJOBS, name) is not None:
            raise Refusal(409, "AlreadyExists", f'trainjobs.{TRAINER} "{name}" already exists')
        runtime = body["spec"]["runtimeRef"]["name"]
        if self.store.get(RUNTIMES, runtime) is None:
            raise Refusal(
                403,
                "Forbidden",
                f'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: {runtime}',
            )
        item = deepcopy(body)
        item["metadata"] |= {"uid": str(uuid4()), "creationTimestamp": now(), "generation": 1}
        item["metadata"].setdefault("namespace", path.split("/namespaces/")[1].split("/")[0])
        item["spec"].setdefault("suspend", False)
        return self.store.write(TRAINJOBS, item, "ADDED")

    def _delete(self, plural: str, item: Object, body: Object) -> Object:
        wanted = body.get("preconditions", {}).get("uid")
        if wanted not in (None, item["metadata"]["uid"]):
            raise Refusal(409, "Conflict", f"Precondition failed: UID in precondition: {wanted}")
        self.mark_deleted(plural, item, body.get("gracePeriodSeconds"))
        return item

    def mark_deleted(self, plural: str, item: Object, grace_s: int | None = None) -> None:
        """Note that an object is to go; what belongs to it goes first."""
        metadata = item["metadata"]
        if plural == PODS:
            grace = item["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            metadata["deletionGracePeriodSeconds"] = min(grace, metadata.get("deletionGracePeriodSeconds", grace))
        elif "deletionTimestamp" in metadata:
            return
        metadata.setdefault("deletionTimestamp", now())
        self.store.write(plural, item)


def find_unknown_fields(train_job: Object) -> list[str]:
    """Return the paths of a TrainJob's fields that Trainer's own models do not have; wrong types are refused."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
    from pydantic import ValidationError

    try:
        known = TrainerV1alpha1TrainJob.from_dict(train_job)
    except ValidationError as error:
        raise Refusal(422, "Invalid", f"TrainJob is invalid: {error}") from error
    assert known is not None
    return list(_compare("", train_job, known.to_dict()))


def selects(query: dict[str, str], item: Object) -> bool:
    """Return whether a request's selectors choose an object."""
    labels = item["metadata"].get("labels", {})
    wanted = [each.split("=") for each in query.get("labelSelector", "").split(",") if each]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in ("", item["metadata"]["name"])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _compare(path: str, given: Any, known: Any) -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(known, dict) or (key not in known and value not in ({}, [], None)):
                yield f"{path}.{key}".removeprefix(".")
            elif key in known:
                yield from _compare(f"{path}.{key}", value, known[key])
    elif isinstance(given, list) and isinstance(known, list):
        for number, (value, other) in enumerate(zip(given, known)):
            yield from _compare(f"{path}[{number}]", value, other)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the test."""


@contextmanager
def serve(cluster: FakeKubernetes) -> Iterator[str]:
    """Serve the cluster on a free port of loopback; yields the address."""
    server = _Server(("127.0.0.1", 0), _make_handler(lambda: cluster))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        cluster.down = True
        cluster.break_watches()
        server.shutdown()
        server.server_close()


def write_kubeconfig(path: Path, server: str, namespace: str | None = "drafts", token: str = TOKEN) -> Path:
    """Write a kubeconfig file with one context."""
    context = {"cluster": "fake", "user": "tester", **({} if namespace is None else {"namespace": namespace})}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "fake", "cluster": {"server": server}}],
        "users": [{"name": "tester", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": context}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def _make_handler(find_cluster: Callable[[], FakeKubernetes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # the body would wait for the acknowledgement of the headers

        def do_GET(self) -> None:
            self._handle("GET")

        def do_POST(self) -> None:
            self._handle("POST")

        def do_DELETE(self) -> None:
            self._handle("DELETE")

        def _handle(self, verb: str) -> None:
            cluster, parts = find_cluster(), urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            token = self.headers.get("Authorization", "")
            if cluster.down:
                self.close_connection = True
                return
            try:
                if query.get("watch", "").lower() == "true":
                    plural, _ = cluster.check("WATCH", parts.path, token)
                    self._stream(cluster.follow(plural, query))
                    return
                value = cluster.answer(verb, parts.path, query, body, token)
                if verb == "POST" and cluster.lost_answers:
                    cluster.lost_answers -= 1
                    self.close_connection = True
                    return
                status = 201 if verb == "POST" else 200
            except Refusal as refusal:
                value, status = refusal.status, refusal.status["code"]
            content = json.dumps(value).encode()
            if isinstance(value, dict) and value.get("message") == "404 page not found":
                content = b"404 page not found\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, events: Iterator[Object]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in events:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args: Any) -> None:
            """A test's output is its own."""

    return Handler
