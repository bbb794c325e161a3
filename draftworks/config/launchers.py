"""Where torchrun jobs run: the kinds of launchers, and the merge of the deployment's settings with a target's. Torch-free.

Nothing here is part of any identity: where a result was computed does not decide what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import Spec, show
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.words import suggest, suggest_or_list

DEFAULT_POOL = "gpu"


class LauncherSpec(Spec):
    """Base of the settings of all kinds of launchers; each kind adds its own keys, and a literal `kind`."""

    kind: Any  # each kind narrows it to a literal string
    grace_s: float = Field(default=10.0, ge=0, description="Seconds between terminate and kill.")
    threads: int = Field(default=1, ge=1, description="OMP threads of each rank on CPU.")
    stall_limit_s: float | None = Field(
        default=1800.0,
        gt=0,
        description="Seconds without progress of any kind after which a job is ended; null: never.",
    )
    time_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one job may run; null: as long as it takes. A scheduler's job that saves checkpoints is "
        "submitted again after that time, until it is done.",
    )
    pool: str | None = Field(
        default=DEFAULT_POOL,
        pattern=r"^\S+$",
        examples=["gpu"],
        description="Dagster's pool in which steps wait for a place before they start such a job; null: they do not wait, "
        "as the scheduler has a queue of its own.",
    )
    nodes: int = Field(default=1, ge=1, description="Machines of one job; each runs as many ranks as a job on one has.")
    min_nodes: int | None = Field(
        default=None, ge=1, description="Fewest machines that a job goes on with after one was lost; null: `nodes`."
    )
    workers: int = Field(
        default=1,
        ge=1,
        description="Jobs that share the work of one partition, each of as many ranks as one would have; for the programs "
        "capture and regenerate. Whatever the number, the result is the same.",
    )
    programs: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="By program (train, capture, evaluate ...): keys of this section that differ for its jobs.",
    )

    @model_validator(mode="after")
    def _check_nodes(self) -> LauncherSpec:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        return self

    @property
    def least_nodes(self) -> int:
        """Fewest machines that a job goes on with."""
        return self.nodes if self.min_nodes is None else self.min_nodes


class SchedulerLauncherSpec(LauncherSpec):
    """Base of the settings of launchers whose jobs live in a scheduler and survive the process that submitted them."""

    poll_interval_s: float = Field(
        default=2.0, gt=0, description="Seconds between two questions to the scheduler about a job."
    )
    orphan_minutes: float = Field(
        default=10.0, gt=0, description="Minutes after which a job is ended that no living run has claimed."
    )


class RayLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted to a Ray cluster: torchrun on one node, or on each of several by Ray Train."""

    kind: Literal["ray"] = "ray"
    address: str = Field(
        default="http://127.0.0.1:8265", min_length=1, description="Of Ray's dashboard, which takes jobs."
    )
    python: str | None = Field(
        default=None, min_length=1, description="Interpreter on the nodes; null: the path of Dagster's own."
    )
    cpus_per_rank: float = Field(default=1.0, ge=0, description="CPUs of Ray that each rank takes.")
    memory_gb: float | None = Field(default=None, gt=0, description="Memory that a job takes on each node, in GB.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom resources of Ray that a job takes on each node, by name."
    )
    start_timeout_s: float = Field(
        default=1800.0, gt=0, description="Seconds in which the nodes of a job of several have to be there."
    )


class SlurmLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted with `sbatch`, from a host that has Slurm's commands and shares `var` with the nodes."""

    kind: Literal["slurm"] = "slurm"
    grace_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds that a job has to save: between terminate and kill, and before its time limit.",
    )
    partition: str | None = Field(default=None, description="Partition, or several with commas; null: the default one.")
    account: str | None = Field(default=None, description="Account that is charged.")
    qos: str | None = Field(default=None, description="Quality of service.")
    gpus: Literal["gpus-per-node", "gres", "none"] = Field(
        default="gpus-per-node",
        description="How the GPUs of a job's ranks are asked for: --gpus-per-node=N, --gres=gpu:N, or not at all.",
    )
    gpu_type: str | None = Field(default=None, description="Type of these GPUs, such as h100.")
    cpus_per_node: int | None = Field(
        default=None, ge=1, description="CPUs on each node; null: `threads` for each rank of it."
    )
    memory: str | None = Field(default=None, description="Memory on each node, such as 64G; 0: all of it.")
    sbatch: list[str] = Field(
        default=[], description="Further options of sbatch, one per entry, such as --constraint=a100 or --exclusive."
    )
    setup: list[str] = Field(
        default=[], description="Lines of shell that run on each node before torchrun, such as `module load cuda`."
    )
    commands: str | None = Field(
        default=None, description="Folder of sbatch, squeue, scontrol and scancel; null: found by PATH."
    )

    @field_validator("sbatch")
    @classmethod
    def _check_options(cls, value: list[str]) -> list[str]:
        for option in value:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"expected options of sbatch such as --constraint=a100, found {option!r}")
            name = option.split("=")[0].split()[0]
            if name in _OURS:
                raise ValueError(f"{name} is set by Draftworks{_OURS[name]}")
        return value

    @field_validator("setup")
    @classmethod
    def _check_lines(cls, value: list[str]) -> list[str]:
        if any("\n" in line for line in value):
            raise ValueError(f"expected one line per entry, found {value!r}")
        return value


_OURS = {
    **dict.fromkeys(("-N", "--nodes"), " (keys nodes and min_nodes)"),
    **dict.fromkeys(("-t", "--time"), " (key time_limit_s)"),
    **dict.fromkeys(("-J", "--job-name", "--comment"), ": jobs are found again by it"),
    **dict.fromkeys(("-o", "--output", "-e", "--error", "--open-mode"), ": the log is beside the run file"),
    **dict.fromkeys(("--requeue", "--no-requeue", "--signal"), ": it submits again what was interrupted"),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node", "-a", "--array"), ": one torchrun runs on each node"),
    **dict.fromkeys(("-W", "--wait", "--parsable", "--test-only", "--wrap", "-H", "--hold"), ": it submits and waits"),
    "--export": ": the job gets the environment of the run",
}

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_KEY)(_|$)", re.IGNORECASE)
_PLACE = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)
_SECRET_REFERENCE = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+")


class KubernetesLauncherSpec(SchedulerLauncherSpec):
    """Jobs are Kubeflow `TrainJob` objects (trainer.kubeflow.org/v1alpha1, Trainer 2.2 or later) of a cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    image: str = Field(
        min_length=1, max_length=500, description="Image of every pod, with Draftworks and its libraries installed."
    )
    python: str = Field(default="python", description="Python of the image.")
    namespace: str | None = Field(
        default=None, description="Namespace of the jobs; null: that of the kubeconfig's context, or of this pod."
    )
    kubeconfig: str | None = Field(
        default=None,
        description="Path of a kubeconfig file; null: the service account of the pod that Dagster runs in, outside a pod "
        "KUBECONFIG or ~/.kube/config.",
    )
    context: str | None = Field(default=None, description="Context of the kubeconfig file; null: its current one.")
    runtime: str = Field(
        default="draftworks",
        description="Training runtime that the jobs refer to; deploy/kubernetes/training-runtime.yaml is one.",
    )
    workers_runtime: str = Field(
        default="draftworks-workers",
        description="Training runtime of workers that share the work of one partition (`workers`); "
        "deploy/kubernetes/workers-runtime.yaml is one.",
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        default="ClusterTrainingRuntime", description="Whether the runtimes are the cluster's or the namespace's."
    )
    queue: str | None = Field(default=None, description="Kueue's LocalQueue; null: jobs start without Kueue.")
    priority_class: str | None = Field(default=None, description="Kueue's WorkloadPriorityClass.")
    resources: dict[str, str] = Field(
        default_factory=dict,
        description="Resources of each pod, such as cpu and memory: requested, and its limits. GPUs are added.",
    )
    gpu_resource: str = Field(default="nvidia.com/gpu", description="Name of the resource that is one GPU.")
    volumes: dict[str, str] = Field(
        default_factory=dict,
        description="By the path at which a pod mounts it, a volume claim, or CLAIM/FOLDER for a folder of it. `var`, the "
        "registry and the models must have the same paths as where Dagster runs.",
    )
    shared_memory: str | None = Field(
        default="8Gi", description="Size of /dev/shm; null: the node's default (64 MiB as a rule)."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of all pods, readable in the TrainJob.")
    secrets: dict[str, str] = Field(
        default_factory=dict, description="By environment variable, the key of a Secret that holds its value: NAME/KEY."
    )
    service_account: str | None = Field(default=None, description="Service account of the pods.")
    image_pull_secrets: list[str] = Field(default_factory=list, description="Secrets with the registry's credentials.")
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the pod's specification that a TrainJob may set: nodeSelector, affinity, tolerations, "
        "securityContext, schedulingGates, volumes.",
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the TrainJob.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of the TrainJob.")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Merged over the finished TrainJob key by key; lists are replaced."
    )
    start_patience_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which a pod may fail to start, such as for an image that cannot be pulled, before the "
        "job is given up.",
    )
    keep_ended_hours: float = Field(
        default=24.0,
        gt=0,
        description="Hours after which a TrainJob that has ended is deleted, by the orphans' sensor.",
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if is_secret_name(name):
                raise ValueError(
                    f"{name} would be readable in the TrainJob: give it in `secrets` as NAME/KEY of a Secret"
                )
        return env

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, reference in secrets.items():
            if not _SECRET_REFERENCE.fullmatch(reference):
                raise ValueError(
                    f"{name}: expected NAME/KEY of a Secret of the namespace (found {len(reference)} characters)"
                )
        return secrets

    @field_validator("volumes")
    @classmethod
    def _check_volumes(cls, volumes: dict[str, str]) -> dict[str, str]:
        for path, source in volumes.items():
            if not PurePosixPath(path).is_absolute() or not source.strip("/"):
                raise ValueError(f"expected ABSOLUTE_PATH: CLAIM or CLAIM/FOLDER (found {path!r}: {source!r})")
        return volumes


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable's name says that its value is a secret, and not the place of one."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


__all__ = [
    "AnyLauncherSpec",
    "KubernetesLauncherSpec",
    "LauncherSpec",
    "LocalLauncherSpec",
    "RayLauncherSpec",
    "SchedulerLauncherSpec",
    "SlurmLauncherSpec",
    "check_overrides",
    "merge_launcher",
    "parse_launcher",
]


class LocalLauncherSpec(LauncherSpec):
    """Jobs run on this machine, as children of the step that started them."""

    kind: Literal["local"] = "local"


AnyLauncherSpec = LocalLauncherSpec | SlurmLauncherSpec | KubernetesLauncherSpec | RayLauncherSpec
"""The union of the kinds that a deployment may choose. A kind is added here when its launcher exists."""
KINDS: dict[str, type[LauncherSpec]] = {each.model_fields["kind"].default: each for each in get_args(AnyLauncherSpec)}
LOCAL = "local"
PROGRAMS = ("regenerate", "plan", "capture", "train", "produce", "memory", "evaluate", "export", "serve")
"""Programs whose jobs a launcher runs, by which settings may differ."""
COMMON_KEYS = frozenset(LauncherSpec.model_fields) - {"kind", "programs"}
"""Keys that every kind has; those that an override of `kind` inherits."""


def parse_launcher(values: Mapping[str, Any], where: str) -> LauncherSpec:
    """Return the settings of one launcher; `kind` is local if it is not given.

    Raises:
        ConfigError: unknown kind, a key that this kind does not have, a bad value, or a program's settings that have one.
    """
    spec = _parse_kind(values, where)
    for program, own in spec.programs.items():
        _require_program(program, f"{where}.programs")
        _parse_kind(_merge([_get_own(spec), own]), f"{where}.programs.{program}")
    return spec


def merge_launcher(deployment: LauncherSpec, target: Mapping[str, Any], program: str, where: str) -> LauncherSpec:
    """Return the settings for the jobs of one program of one target, merged key by key.

    A later layer counts before an earlier one: the deployment, its `programs` entry, the target, its `programs` entry.
    Mappings are merged too, lists are replaced. A layer that changes `kind` inherits the common keys only.

    Args:
        where: place of the target's settings, for messages.

    Raises:
        ConfigError: see `parse_launcher`.
    """
    layers = [_get_own(deployment), deployment.programs.get(program, {}), *_list_layers(target, program)]
    return _parse_kind(_merge(layers), where)


def check_overrides(deployment: LauncherSpec, target: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a target's settings cannot be merged into the deployment's, for whatever program."""
    programs = target.get("programs", {})
    if not isinstance(programs, Mapping) or not all(isinstance(own, Mapping) for own in programs.values()):
        raise ConfigError(f"{where}.programs: expected settings by program, found {show(programs, 40)}")
    for program in programs:
        _require_program(program, f"{where}.programs")
    for program in PROGRAMS:
        merge_launcher(deployment, target, program, f"{where}.programs.{program}" if program in programs else where)


def _list_layers(target: Mapping[str, Any], program: str) -> list[Mapping[str, Any]]:
    return [
        {key: value for key, value in target.items() if key != "programs"},
        target.get("programs", {}).get(program, {}),
    ]


def _get_own(spec: LauncherSpec) -> dict[str, Any]:
    """Return the keys that a file gave, without those by program."""
    return {**spec.model_dump(exclude_unset=True, exclude={"programs"}), "kind": spec.kind}


def _merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        if merged and layer.get("kind", merged["kind"]) != merged["kind"]:
            merged = {key: value for key, value in merged.items() if key in COMMON_KEYS}
        merged = _merge_mappings(merged, layer)
    return merged


def _merge_mappings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merge_mappings(old, value)
        merged[key] = value
    return merged


def _parse_kind(values: Mapping[str, Any], where: str) -> LauncherSpec:
    kind = values.get("kind", LOCAL)
    if not isinstance(kind, str) or kind not in KINDS:
        hint = suggest(kind, KINDS)
        found = f"{where}: kind: expected one of {', '.join(KINDS)}, found {show(kind)}"
        raise ConfigError(f"{found}; {hint}" if hint else found)
    keys = KINDS[kind].model_fields
    for key in values:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key}; {_suggest_key(key, kind)}")
    return parse_spec(KINDS[kind], dict(values), where)


def _require_program(program: str, where: str) -> None:
    if program not in PROGRAMS:
        raise ConfigError(f"{where}: unknown program {program}; {suggest_or_list(program, PROGRAMS)}")


def _suggest_key(key: str, kind: str) -> str:
    """Return what a key may be that this kind does not have: the same key of another kind, or one like it of this one."""
    others = [other for other, spec in KINDS.items() if key in spec.model_fields]
    if others:
        return f"it is one of kind {' and '.join(others)}, and the kind here is {kind}"
    own = list(KINDS[kind].model_fields)
    every = {*own, *(name for spec in KINDS.values() for name in spec.model_fields)}
    return suggest(key, every) or suggest_or_list(key, own)
