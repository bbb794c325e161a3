"""The Kubeflow TrainJob of a job and its runtime, written from a request and the deployment's settings. Imports no client."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from draftworks.config.launchers import KubernetesLauncherSpec
from draftworks.config.run_files import COPY_VARIABLE
from draftworks.errors import ConfigError
from resources.scheduler import JobRequest
from resources.torch_job import ONE_NODE, ONE_NODE_ENV, TorchJob

GROUP = "trainer.kubeflow.org"
VERSION = "v1alpha1"
PLURAL = "trainjobs"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "draftworks"
CLAIM = "draftworks/claim"
MIN_NODES = "draftworks/min-nodes"
COPIES = "draftworks/copies"
FAILED_BEFORE = 79
"""Exit code of a copy's pod whose earlier start has left an error of the program: the runtime starts it no more."""
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
NODE = "node"
"""Name of the replicated job, and of its container, in which a TrainJob runs its command."""

_TORCHRUN_SHARE_OF_GRACE = 0.7
_JOIN_S = 900
"""Seconds for which the nodes of a job wait for each other: one may still pull the image."""

_START = f"""\
run=$1 log=$2 ranks=$3 environment=$4 first=$5 copies=$6
shift 6
node=${{JOB_COMPLETION_INDEX:-0}}
if [ "$copies" = 1 ]; then
  own=node$node
  [ "$node" = 0 ] || log=${{log%.log}}-$own.log
else
  own=copy$node
  log=${{log%.log}}-$own.log
fi
ranks=$ranks/$own
if [ ! -d "$run" ]; then
  echo "the folder of the run, $run, is not there in this pod: mount the volume that has it at the same path" >&2
  exit 78
fi
if [ ! -r "$environment" ]; then
  echo "$environment cannot be read as user $(id -u): run the pods as the user that runs Dagster" >&2
  exit 78
fi
. "$environment"
if [ "$copies" != 1 ]; then
  export {COPY_VARIABLE}="$node" TORCHELASTIC_ERROR_FILE="${{TORCHELASTIC_ERROR_FILE%.json}}-$own.json"
  if grep -rqs '"interrupted": false' --include=error.json "$ranks"; then
    echo "an earlier start of this copy has failed, see $log" >&2
    exit {FAILED_BEFORE}
  fi
fi
if [ -e "$ranks" ]; then
  mkdir -p "$run/earlier"
  mv "$ranks" "$(mktemp -d "$run/earlier/$own-XXXXXX")"
  [ "$node" != 0 ] && [ "$copies" = 1 ] || rm -f "$TORCHELASTIC_ERROR_FILE"
fi
export PET_LOG_DIR="$ranks"
if [ -z "$first" ]; then
  PET_RDZV_ENDPOINT="$(mktemp -d)/store"
else
  PET_RDZV_ENDPOINT="${{PET_MASTER_ADDR:-$first}}:${{PET_MASTER_PORT:-29500}}"
  PET_RDZV_CONF="is_host=$([ "$node" = 0 ] && echo true || echo false),join_timeout={_JOIN_S},read_timeout={_JOIN_S}"
  PET_LOCAL_ADDR=$POD_IP
  export PET_RDZV_CONF PET_LOCAL_ADDR
fi
export PET_RDZV_ENDPOINT
echo "The output of this node is in $log"
exec "$@" >>"$log" 2>&1
"""
"""What a pod runs: it checks the shared folder, puts away what an earlier start of the same pod index left, such as one
that was suspended, and becomes torchrun, so that the kubelet's signal reaches torchrun itself."""


def write_train_job(
    request: JobRequest, spec: KubernetesLauncherSpec, namespace: str, nodes: int | None = None
) -> dict[str, Any]:
    """Return the TrainJob of a request, for fewer nodes than it asks for if `nodes` says so.

    Raises:
        ConfigError: no volume holds the folder of the run.
    """
    require_volume(request, spec)
    job = replace(request.job, nodes=nodes or request.job.nodes)
    more = {} if request.min_nodes is None else {MIN_NODES: str(request.min_nodes)}
    more |= {} if job.copies == 1 else {COPIES: str(job.copies)}
    manifest = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": request.name,
            "namespace": namespace,
            "labels": _list_labels(spec),
            "annotations": {**spec.annotations, **more, CLAIM: str(request.claim)},
        },
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": spec.runtime_kind, "name": choose_runtime(job, spec)},
            "trainer": {
                "image": spec.image,
                "command": ["/bin/sh", "-c", _escape(_START)],
                "args": [_escape(word) for word in ("start", *_list_arguments(request, job, spec))],
                "env": _list_env(spec),
                "numNodes": max(job.nodes, job.copies),
                **({"numProcPerNode": job.procs_per_node} if job.copies == 1 else {}),
                "resourcesPerNode": _list_resources(job, spec),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": _nest_pod(_patch_pod(spec))}],
        },
    }
    if spec.time_limit_s is not None:
        manifest["spec"]["activeDeadlineSeconds"] = max(1, int(spec.time_limit_s))
    return _merge(manifest, spec.overrides)


def choose_runtime(job: TorchJob, spec: KubernetesLauncherSpec) -> str:
    """Return the name of a job's training runtime: several copies are pods that do not wait for each other."""
    return spec.runtime if job.copies == 1 else spec.workers_runtime


def locate_environment(request: JobRequest, spec: KubernetesLauncherSpec) -> Path:
    """Return the path of the file with the job's environment; two requests with different values never share one."""
    digest = hashlib.sha256(_format_environment(request, spec).encode()).hexdigest()
    return request.files.path / f"environment-{digest[:16]}.sh"


def write_environment(request: JobRequest, spec: KubernetesLauncherSpec) -> None:
    """Write the job's environment into its run's folder, readable by its owner only.

    It does not stand in the TrainJob, which everyone with access to the namespace can read.
    """
    path = locate_environment(request, spec)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(_format_environment(request, spec))


def _format_environment(request: JobRequest, spec: KubernetesLauncherSpec) -> str:
    own = {
        "OMP_NUM_THREADS": str(spec.threads),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(spec.grace_s * _TORCHRUN_SHARE_OF_GRACE)),
        **(ONE_NODE_ENV if request.job.nodes == 1 else {}),
    }
    values = {**own, **request.job.env, **request.env}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items()))


def _list_arguments(request: JobRequest, job: TorchJob, spec: KubernetesLauncherSpec) -> list[str]:
    """Return the arguments of the start script: its files, the address of the first node, and torchrun's line."""
    files, environment = request.files, locate_environment(request, spec)
    job = replace(job, python=job.python or Path(spec.python))
    meeting: tuple[str, ...] = ONE_NODE
    first = ""
    if job.nodes > 1:
        meeting = (f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={request.name}")
        first = f"{request.name}-{NODE}-0-0.{request.name}"
    if job.copies > 1:
        meeting = ("--nnodes=1", *ONE_NODE)  # Trainer may give each pod the number of all
    paths = map(str, (files.path, files.log, files.ranks, environment))
    return [*paths, first, str(job.copies), *job.build_command(*meeting)]


def _list_labels(spec: KubernetesLauncherSpec) -> dict[str, str]:
    labels = {**spec.labels, MANAGED_BY: MANAGER}
    labels |= {} if spec.queue is None else {QUEUE: spec.queue}
    return labels | ({} if spec.priority_class is None else {PRIORITY_CLASS: spec.priority_class})


def _list_env(spec: KubernetesLauncherSpec) -> list[dict[str, Any]]:
    """Return the environment of the pods in the TrainJob: nothing of the request, and secrets by reference only."""
    env: list[dict[str, Any]] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    env += [{"name": name, "value": _escape(value)} for name, value in sorted(spec.env.items())]
    for name, reference in sorted(spec.secrets.items()):
        secret, key = reference.split("/", 1)
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return env


def _list_resources(job: TorchJob, spec: KubernetesLauncherSpec) -> dict[str, Any]:
    amounts = dict(spec.resources)
    if job.gpus_per_node:
        amounts[spec.gpu_resource] = str(job.gpus_per_node)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _patch_pod(spec: KubernetesLauncherSpec) -> dict[str, Any]:
    claims = sorted({source.split("/", 1)[0] for source in spec.volumes.values()})
    volumes: list[dict[str, Any]] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    mounts = []
    for path, source in sorted(spec.volumes.items()):
        claim, _, folder = source.partition("/")
        inside = {"subPath": folder.strip("/")} if folder.strip("/") else {}
        mounts.append({"name": f"volume-{claims.index(claim)}", "mountPath": path, **inside})
    if spec.shared_memory is not None:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shared_memory}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    pod: dict[str, Any] = {}
    if spec.service_account is not None:
        pod["serviceAccountName"] = spec.service_account
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    more = dict(spec.pod)
    volumes += more.pop("volumes", [])
    if volumes:
        pod["volumes"] = volumes
    if mounts:
        pod["containers"] = [{"name": NODE, "volumeMounts": mounts}]
    return _merge(pod, more)


def _nest_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a patch of the runtime that sets a pod's specification; two templates lie between them."""
    of_job = {"spec": {"template": {"spec": pod}}}
    return {"template": {"spec": {"replicatedJobs": [{"name": NODE, "template": of_job}]}}}


def require_volume(request: JobRequest, spec: KubernetesLauncherSpec) -> None:
    """Raise ConfigError if no volume holds the folder of the run, unless the settings set the pods' volumes themselves."""
    folder = PurePosixPath(request.files.path)
    if not any(folder.is_relative_to(path) for path in spec.volumes) and not spec.pod and not spec.overrides:
        raise ConfigError(
            f"launcher.volumes: none holds the folder of the run, {folder} (found {', '.join(spec.volumes) or 'none'}). "
            "Mount the claim that has `var` at the path that `var` has here, for example {PATH: CLAIM}"
        )


def _escape(text: str) -> str:
    """Return text that Kubernetes' expansion of $(NAME) in commands and values gives back unchanged."""
    return text.replace("$", "$$")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


_DEFAULT_GRACE_S = 30
"""Kubernetes' own, of pods that say nothing."""


def require_runtime(runtime: dict[str, Any], grace_s: float, copies: int = 1) -> None:
    """Raise ConfigError if jobs of a runtime would be started again by the cluster, or killed within their grace.

    Restarts are the launcher's: it knows whether an end was an error of the program, which a restart only repeats. Those of
    one of several copies are the cluster's, which has to leave the others alone.
    """
    name = runtime["metadata"]["name"]
    jobset = runtime["spec"]["template"]["spec"]
    nodes = [each for each in jobset.get("replicatedJobs", ()) if each["name"] == NODE]
    if not nodes:
        raise ConfigError(
            f"launcher.runtime: {name} has no replicated job {NODE!r}. deploy/kubernetes/training-runtime.yaml is one"
            " that fits."
        )
    job = nodes[0]["template"]["spec"]
    pod = job["template"]["spec"]
    problems = []
    if not any(container["name"] == NODE for container in pod.get("containers", ())):
        problems.append(f"a container {NODE!r}")
    if copies > 1:
        if not job.get("backoffLimitPerIndex"):
            problems.append("backoffLimitPerIndex, by which one copy is started again alone")
    elif job.get("backoffLimit") != 0:
        problems.append(f"backoffLimit 0 (found {job.get('backoffLimit', 'none, which is 6')})")
    if pod.get("restartPolicy") != "Never":
        problems.append(f"restartPolicy Never (found {pod.get('restartPolicy', 'none, which is OnFailure')})")
    if restarts := jobset.get("failurePolicy", {}).get("maxRestarts"):
        problems.append(f"failurePolicy.maxRestarts 0 (found {restarts})")
    grace = pod.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace < grace_s:
        problems.append(f"terminationGracePeriodSeconds of at least launcher.grace_s, {grace_s:g} (found {grace})")
    if problems:
        key, file = ("runtime", "training-runtime") if copies == 1 else ("workers_runtime", "workers-runtime")
        hint = f"deploy/kubernetes/{file}.yaml is one that fits."
        raise ConfigError(f"launcher.{key}: {name} needs {'; '.join(problems)}. {hint}")
