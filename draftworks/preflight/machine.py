"""Checks of this machine for a target: placement, folders, processors, devices, engines, variables. Torch-free."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from draftworks.capture.software import ENGINE_SOFTWARE
from draftworks.config.capture import EngineInstallation
from draftworks.config.launchers import DEFAULT_POOL, LOCAL
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.services import check_object_storage, check_stream, find_existing
from draftworks.servers.environment import EngineSoftware
from draftworks.sglang.environment import SGLANG, require_capturing
from draftworks.storage.words import find_close
from draftworks.targets.fitted_defaults import DEVICES, read_machine
from draftworks.targets.registry import Registry

_LOOPBACK = ("127.", "localhost", "[::1]")


def runs_here(target: TargetSpec, registry: Registry, program: str) -> bool:
    """Whether the jobs of a program run on the machine of their launcher alone."""
    launcher = registry.resolve_launcher(target, program)
    return launcher.kind == LOCAL and launcher.nodes == 1


def check_placement(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    _check_batches(target, registry, findings)
    _check_stream_addresses(target, registry, findings)


def _check_batches(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that each global batch can be divided over the ranks of all nodes, also of those left when some are lost."""
    launcher = registry.resolve_launcher(target, "train")
    for name, entry in target.strategies.items():
        where = f"target {target.name}: strategies.{name}.training"
        problem = _find_batch_problem(entry.training, launcher.nodes)
        if problem:
            findings.error(f"{where}: {problem}. Correct it, or launcher.programs.train.nodes")
            continue
        for nodes in range(launcher.least_nodes, launcher.nodes):
            problem = _find_batch_problem(entry.training, nodes)
            if problem:
                findings.warning(
                    f"{where}: a training that goes on with {nodes} of {launcher.nodes} nodes (launcher min_nodes) would end: "
                    f"{problem}"
                )


def _find_batch_problem(training: TrainingSpec, nodes: int) -> str:
    """Return why a training cannot be divided over so many nodes; empty if it can."""
    ranks, batch = nodes * training.processes, training.global_batch_size
    if training.pack_tokens is not None:
        return f"global_batch_size {batch} gives {ranks} ranks less than a sample each" if batch < ranks else ""
    share = training.micro_batch_size * ranks
    if batch % share == 0:
        return ""
    return (
        f"global_batch_size {batch} is not a multiple of micro_batch_size {training.micro_batch_size} x {nodes} nodes x "
        f"processes {training.processes} = {share}"
    )


def _check_stream_addresses(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn of addresses that only this host reaches where jobs of a stream may run on others.

    No error: a scheduler's jobs may all run on the launcher's own host.
    """
    streaming = target.streaming
    if streaming is None or all(runs_here(target, registry, program) for program in ("train", "produce")):
        return
    where = f"target {target.name}: streaming"
    if streaming.control is None:
        findings.warning(
            f"{where}.control: null, and its jobs may run on hosts without the control plane's database: set control.listen to "
            "an address of this host that they reach"
        )
    elif streaming.control.listen.startswith(_LOOPBACK):
        findings.warning(
            f"{where}.control.listen: {streaming.control.listen} is reached from the launcher's own host only, and its jobs "
            "may run on others: name an address of it that they reach"
        )
    if streaming.store.kind == "mooncake" and streaming.store.host.startswith(_LOOPBACK):
        findings.warning(
            f"{where}.store.host: {streaming.store.host} is reached from the launcher's own host only, and its jobs may run "
            "on others: name an address of it that they reach"
        )


def check_named_outside(target: TargetSpec, findings: Findings, environment: Mapping[str, str] = os.environ) -> None:
    """Warn of variables and programs that a target's entry names and this machine lacks: another one may have them."""
    where, endpoint = f"target {target.name}", target.responses.endpoint
    hook = None if target.service is None else target.service.hook
    keys = {
        "responses.endpoint.api_key_env": endpoint and endpoint.api_key_env,
        "service.hook.api_key_env": hook and hook.api_key_env,
        **{f"servers.{server.name}.api_key_env": server.api_key_env for server in target.servers},
    }
    for key, name in keys.items():
        if name and name not in environment:
            findings.warning(f"{where}: {key}: the environment has no {name}: set it where runs start")
    command = None if hook is None else hook.command
    if command and shutil.which(command[0], path=environment.get("PATH")) is None:
        found = "no such file" if Path(command[0]).is_absolute() else "it is not on PATH"
        findings.warning(
            f"{where}: service.hook.command: no program {command[0]} here ({found}): correct it, or install it where drafts "
            "are promoted"
        )


def find_deployment_warnings(
    deployment: DeploymentSpec, targets: Iterable[TargetSpec], environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return a warning for each variable of a channel that is not set here, and for pools whose names are nearly equal."""
    found = []
    for number, channel in enumerate(deployment.notifications):
        for key in ("url_env", "api_key_env"):
            name = getattr(channel, key)
            if name and not environment.get(name):
                found.append(
                    f"notifications.{number}.{key}: the environment has no {name}: set it where Dagster's daemon runs"
                )
    found += _list_similar_pools([deployment.launcher.model_dump(), *(target.launcher for target in targets)])
    return [Finding("warning", f"deployment: {text}") for text in found]


def _list_similar_pools(launchers: Iterable[Mapping[str, object]]) -> list[str]:
    """Name pools that differ little from another one: each lets jobs in beside those of the other."""
    known, found = [DEFAULT_POOL], []
    for pool in dict.fromkeys(each.get("pool") for each in launchers):
        if not isinstance(pool, str) or pool in known:
            continue
        close = find_close(pool, known, most=1)
        known.append(pool)
        if close:
            found.append(f"launcher.pool: {pool} is another pool than {close[0]}; did you mean {close[0]}?")
    return found


@dataclass(frozen=True)
class GpuUse:
    """GPUs that the jobs of one program ask for.

    Attributes:
        key: of the registry entry, for messages.
        gpus: by all processes of a machine.
    """

    key: str
    device: str
    gpus: int


def check_devices(target: TargetSpec, registry: Registry, findings: Findings, devices: Path = DEVICES) -> None:
    """Check that jobs that run here find the GPUs that they ask for.

    Args:
        devices: folder of the machine's device files.
    """
    machine = read_machine(devices)
    if machine.other_gpu:
        return
    found = machine.gpus
    for use in _list_uses(target, registry):
        if use.device == "cuda" and found < use.gpus:
            findings.error(
                f"target {target.name}: {use.key}.device: cuda needs {use.gpus} GPU(s) for the processes of a machine, and "
                f"this one has {found}. Lower the processes, use cpu, or another launcher"
            )
    if not found:
        _check_work_on_a_cpu(target, registry, findings)


def _list_uses(target: TargetSpec, registry: Registry) -> list[GpuUse]:
    capture, serving = target.capture, target.evaluation.serving
    uses = []
    if runs_here(target, registry, "capture") and not capture.server.external:
        uses.append(GpuUse("capture", capture.device, capture.processes * capture.gpus_per_process))
    if runs_here(target, registry, "train"):
        trained = {name: entry.training for name, entry in target.strategies.items()}
        uses += [GpuUse(f"strategies.{name}.training", one.device, one.processes) for name, one in trained.items()]
    if any(map(serving.starts, serving.engines)) and runs_here(target, registry, "serve"):
        uses.append(GpuUse("evaluation.serving", serving.device, serving.server.gpus))
    return uses


def _check_work_on_a_cpu(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check what device auto will be a CPU for, and cannot be done on one."""
    where, serving = f"target {target.name}", target.evaluation.serving
    if runs_here(target, registry, "train"):
        for name, entry in target.strategies.items():
            options = resolve_strategy(name).parse_options(entry.options, where=f"{where}: {name}")
            if entry.training.device == "auto" and getattr(options, "attention", None) == "flex":
                findings.error(
                    f"{where}: {name}: attention flex has no gradients on a CPU, and training.device auto is one here: set "
                    "options.attention to sdpa or auto"
                )
    asked = serving.starts("sglang") and serving.device == "auto" and runs_here(target, registry, "serve")
    if asked and serving.compute_dtype != "float32":
        findings.warning(
            f"{where}: evaluation.serving.compute_dtype: {serving.compute_dtype}, and device auto is a CPU here, where "
            "SGLang speculates in float32 only: set float32"
        )


def check_custom_engine(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the module of a user's own engine is there. It is not imported."""
    custom = target.capture.custom
    if custom is None:
        return
    module = custom.entry_point.partition(":")[0]
    if not _has_module(module):
        report = findings.error if runs_here(target, registry, "capture") else findings.warning
        report(
            f"target {target.name}: capture.custom.entry_point {custom.entry_point}: there is no module {module} here. Install "
            "its package, or correct the name"
        )


def _has_module(name: str) -> bool:
    """Whether a module can be found; its packages are not imported. Jobs find modules of their working folder too."""
    top, *rest = name.split(".")
    found = _find_top(top)
    for index in range(len(rest)):
        if found is None or found.submodule_search_locations is None:
            return False
        path = ".".join((top, *rest[: index + 1]))
        found = PathFinder.find_spec(path, list(found.submodule_search_locations))
    return found is not None


def _find_top(name: str) -> ModuleSpec | None:
    try:
        found = find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None
    return found or PathFinder.find_spec(name, [os.getcwd()])


_MAX_RANKS_PER_PROCESSOR = 4
"""More CPU ranks for each processor than this are warned about."""


def check_machine(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    check_writable(registry, findings)
    check_object_storage(registry, findings)
    where, processors = f"target {target.name}", os.cpu_count() or 1
    ranks = {"capture": (target.capture.processes, target.capture.device)}
    ranks |= {
        f"strategies.{n}.training": (e.training.processes, e.training.device) for n, e in target.strategies.items()
    }
    for key, (processes, device) in ranks.items():
        if device == "cpu" and processes > _MAX_RANKS_PER_PROCESSOR * processors:
            findings.warning(f"{where}: {key}.processes: found {processes} on a machine with {processors} processors")
    check_devices(target, registry, findings)
    check_custom_engine(target, registry, findings)
    _check_engines(target, registry, findings)
    check_stream(target, registry, findings)
    _check_control_address(target, findings)
    check_named_outside(target, findings)


def _check_control_address(target: TargetSpec, findings: Findings) -> None:
    """Check that a stream's control server can listen where it is told to: beside the launcher, so on this machine."""
    control = None if target.streaming is None else target.streaming.control
    if control is None:
        return
    host = control.listen.rpartition(":")[0].strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        findings.error(
            f"target {target.name}: streaming.control.listen: expected an address of this machine, on which the launcher runs, "
            f"found {control.listen}: {error}"
        )


def check_writable(registry: Registry, findings: Findings) -> None:
    """Check that results can be published: each result folder, or its nearest existing parent, is a writable folder."""
    deployment = registry.load_deployment()
    places = {"var": registry.resolve_var_folder()}
    if deployment.features.root is not None:
        places["features.root"] = registry.resolve_path(deployment.features.root)
    if deployment.features.kind == "shared_dir" and not places["features.root"].is_dir():
        findings.error(
            f"deployment: features.root: {places['features.root']} is not a folder: mount it, or correct the path"
        )
    for key, place in places.items():
        existing = find_existing(place)
        if not existing.is_dir():
            findings.error(
                f"deployment: {key}: {existing} is not a folder, so {place} cannot be created: move it away, or name another"
            )
        elif (reason := _try_to_write(existing)) is not None:
            findings.error(
                f"deployment: {key}: {existing} cannot be written to ({reason}): give this user the right to, or name another"
            )


def _try_to_write(folder: Path) -> str | None:
    """Return why nothing can be created in a folder, by creating a folder: of /proc and the like the mode says nothing."""
    try:
        with tempfile.TemporaryDirectory(prefix=".draftworks-", dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def explain_start(target: TargetSpec, software: EngineSoftware) -> str:
    """Return for what a target starts an engine of its own Python; empty if it does not."""
    capture, serving = target.capture, target.evaluation.serving
    if capture.starts_engine and capture.software == software.key:
        return f"capture.backend {capture.backend}"
    serves = any(engine == software.key and serving.starts(engine) for engine in serving.engines)
    return "evaluation.serving.prompts" if serves else ""


def locate_python(registry: Registry, software: EngineSoftware) -> Path:
    """Return the Python that the deployment names for an engine."""
    installation: EngineInstallation = getattr(registry.load_deployment(), software.key)
    return Path(os.path.abspath(registry.root / installation.python))


def _check_engines(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that environments of engines exist and have them, by their files: the programs start them, which takes seconds."""
    for software in ENGINE_SOFTWARE.values():
        reason, python = explain_start(target, software), locate_python(registry, software)
        if not reason:
            continue
        if not python.is_file():
            findings.error(
                f"target {target.name}: {reason} needs {software.name}, and {python} does not exist: make {software.key}-env, "
                f"or name its environment in registry/deployment.yaml: {software.key}.python"
            )
            continue
        with findings.collect_errors():
            version = software.find_installed_version(python)
            _require_engine(software, python, version, reason.startswith("capture"))
            if version and version.partition("+")[0] not in software.versions:
                findings.warning(
                    f"target {target.name}: {python}, named as {software.key}.python, is {software.name} {version}, tested with "
                    f"{' and '.join(software.versions)}: what it captures counts if it equals the target's own layers"
                )


def _require_engine(software: EngineSoftware, python: Path, version: str | None, captures: bool) -> None:
    """Raise ConfigError if the environment certainly has no such engine, or one that cannot capture what it has to."""
    where = f"{python}, named as {software.key}.python,"
    if version == "":
        raise ConfigError(f"{where} has no {software.name}: install it there (make {software.key}-env)")
    if version and captures and software is SGLANG:
        require_capturing(version, where)
