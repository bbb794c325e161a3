"""Checks of what an entry reaches: object storage, schedulers, served prompts. Torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence

from draftworks.config.deployment import DeploymentSpec
from draftworks.config.launchers import LOCAL, PROGRAMS
from draftworks.config.registry_files import TargetSpec
from draftworks.data.sources import SERVED
from draftworks.errors import ConfigError, DraftworksError
from draftworks.preflight.findings import Findings
from draftworks.storage.object_access import parse_object_url
from draftworks.storage.object_store import ObjectStore
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import load_slice_plan, load_training_datasets

FEATURES, PUBLISH = "features.url", "publish.url"
"""Keys of the deployment that name a place in object storage."""


def check_object_storage(registry: Registry, findings: Findings) -> None:
    """Check the library and the keys of the deployment's object storage. Nothing is sent."""
    deployment = registry.load_deployment()
    for key, url in list_storage_places(deployment):
        try:
            _open(deployment, url)
        except ConfigError as error:
            findings.error(_describe(key, error))


def find_storage_problems(
    registry: Registry, keys: Collection[str] = (FEATURES, PUBLISH), longest_wait_s: float | None = None
) -> list[str]:
    """Write a small object to places of the deployment, and remove it; return what went wrong, keys that are missing too.

    Args:
        longest_wait_s: for a server that does not answer, where the deployment waits longer.
    """
    deployment, found = registry.load_deployment(), list[str]()
    for key, url in list_storage_places(deployment):
        try:
            if key in keys:
                _open(deployment, url, longest_wait_s).require_writable()
        except DraftworksError as error:
            found.append(_describe(key, error))
    return found


def list_storage_places(deployment: DeploymentSpec) -> Iterator[tuple[str, str]]:
    """Yield each key of the deployment that names a place in object storage, with its URL."""
    if deployment.features.url is not None:
        yield FEATURES, deployment.features.url
    if deployment.publish is not None:
        yield PUBLISH, deployment.publish.url


def _open(deployment: DeploymentSpec, url: str, longest_wait_s: float | None = None) -> ObjectStore:
    access = deployment.object_storage.select(parse_object_url(url).bucket)
    if longest_wait_s is not None and access.retry_s > longest_wait_s:
        access = access.model_copy(update={"retry_s": longest_wait_s})
    return ObjectStore.open(url, access)


def _describe(key: str, error: DraftworksError) -> str:
    return f"deployment: {key}: {error}"


def find_refused_jobs(registry: Registry, names: Sequence[str], limit_s: float | None = None) -> dict[str, list[str]]:
    """Return, by target, why schedulers would not take its jobs.

    Args:
        names: targets that `list_scheduler_users` returned.
        limit_s: seconds after which schedulers count as not answering; None: as long as they take.
    """
    if not names:
        return {}
    command = [sys.executable, "-m", "resources.launcher_checks", str(registry.root), *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(names, [f"launcher: schedulers did not answer within {limit_s:.0f} s"])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return dict.fromkeys(names, [f"launcher: schedulers could not be asked: {last}"])
    return json.loads(done.stdout)


def list_scheduler_users(registry: Registry, names: Sequence[str]) -> list[str]:
    """Return the targets among `names` that have jobs for other machines than this one."""
    return [name for name in names if _uses_scheduler(registry, name)]


def _uses_scheduler(registry: Registry, name: str) -> bool:
    """Whether a target has jobs for other machines than this one. An invalid entry, which is reported, has none."""
    try:
        target = registry.load_target(name)
        specs = [registry.resolve_launcher(target, program) for program in PROGRAMS]
    except DraftworksError:
        return False
    return any(spec.kind != LOCAL or spec.nodes > 1 for spec in specs)


def check_served_data(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that served prompts are answered again, that no eval set of a mix is trained on, and that weights can be read."""
    try:
        trained = {spec.name: spec for spec in load_training_datasets(target, registry)}
    except ConfigError:
        return  # reported with the data sets
    where = f"target {target.name}"
    served = [name for name, spec in trained.items() if spec.format == SERVED]
    if served and target.responses.mode == "passthrough":
        findings.error(f"{where}: data set {served[0]} holds prompts without answers: set responses.mode to regenerate")
    for name in filter(registry.list_eval_sets().__contains__, target.evals):
        with findings.collect_errors():
            spec = registry.load_eval_set(name)
            if spec.dataset in trained and spec.part == "all" and (target.mix is not None or spec.dataset in served):
                findings.error(
                    f"{where}: eval set {name}: drafts are trained on its data set {spec.dataset}: set part to held_out"
                )
    with findings.collect_errors():
        load_slice_plan(target, registry)
