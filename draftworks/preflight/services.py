"""Checks of what an entry reaches: object storage, schedulers, served prompts, disks and Mooncake of a stream. Torch-free."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from draftworks.config.launchers import LOCAL, PROGRAMS
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.data.growing_files import find_source, read_head
from draftworks.data.sources import SERVED
from draftworks.errors import ConfigError, DraftworksError
from draftworks.planning.estimates import NOTHING, Estimate
from draftworks.planning.plan import GB, estimate_new_bytes
from draftworks.planning.subject import PlanSubject
from draftworks.preflight.findings import Findings
from draftworks.storage.object_access import parse_object_url
from draftworks.storage.object_store import ObjectStore
from draftworks.storage.shared_folder import find_mount
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import load_slice_plan, load_training_datasets

FEATURES, PUBLISH = "features.url", "publish.url"
"""Keys of the deployment that name a place in object storage."""
CHECKED_LINES = 200
"""Of the logs of requests: those that were written last."""


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


def check_request_logs(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the last lines of the logs of requests can be used, and to whose draft they belong."""
    from draftworks.production.served_logs import read_logs
    from draftworks.production.served_view import list_log_notes

    requests = target.observation.requests
    if requests is None:
        return
    where = f"target {target.name}: observation.requests"
    if not target.observed_strategies:
        findings.error(f"{where}: the target has several strategies: set `strategy`, or name the servers in `servers`")
    last = requests.model_copy(update={"max_lines": min(requests.max_lines, CHECKED_LINES)})
    observation = target.observation.model_copy(update={"requests": last})
    with findings.collect_errors():
        checked = target.model_copy(update={"observation": observation})
        logs = read_logs(checked, registry.root, registry.resolve_var_folder())
        if not logs.reading.requests:
            tell = findings.warning if logs.reading.lines else findings.note
            tell(f"{where}: none of the last lines can be used: {'; '.join(list_log_notes(logs))}")


_IMPORT_TIMEOUT_S = 60.0


def check_stream(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    if target.streaming is None:
        return
    _check_control_folder(target, registry, findings)
    if target.arrives:
        with findings.collect_errors():
            _check_source(target, registry)
    if target.streaming.store.kind == "mooncake":
        _check_mooncake(target, registry, findings)


def _check_source(target: TargetSpec, registry: Registry) -> None:
    """Raise DraftworksError if the source of a training in arrival order is not there, or has not enough rows to begin."""
    assert target.streaming is not None
    name, rows = target.streaming.source, target.streaming.vocabulary_samples
    if name is not None:
        find_source(name)
    if rows is not None:
        read_head(registry.load_dataset(target.dataset), registry.root, rows)


def find_existing(place: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def _check_control_folder(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the control plane's database will be in a folder of a local disk that this user may write to."""
    named = None if target.streaming is None else target.streaming.control_folder
    key = "var of the deployment" if named is None else "streaming.control_folder"
    place = registry.resolve_var_folder() if named is None else registry.resolve_path(named)
    existing, mount = find_existing(place), find_mount(place)
    if named is not None and not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        findings.error(
            f"target {target.name}: {key}: expected a folder that this user may write to, found {existing}: correct its "
            "permissions, or name another"
        )
    if mount is not None and mount.is_shared:
        findings.error(
            f"target {target.name}: {key}: {place} is on a network file system ({mount.kind}, on {mount.point}), and the "
            "control plane needs a disk of this host: set streaming.control_folder"
        )


def _check_mooncake(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that each Python whose programs use a stream's Mooncake store can import the library."""
    pythons = [Path(sys.executable)]
    inside = target.capture.inside
    if inside is not None:
        named = getattr(registry.load_deployment(), inside).python
        pythons.append(Path(os.path.abspath(registry.root / named)))
    for python in pythons:
        problem = _find_import_problem(python)
        if problem:
            where = "this Python" if python == pythons[0] else f"{inside}.python"
            findings.error(
                f"target {target.name}: streaming.store.kind mooncake: {where}: {problem.rpartition(': ')[2][:60]}. Install "
                "draftworks[mooncake], and libibverbs1 libnl-3-200 libnl-route-3-200"
            )


def _find_import_problem(python: Path) -> str:
    """Return why an interpreter cannot import Mooncake; empty if it can."""
    try:
        tried = subprocess.run(
            [str(python), "-c", "import mooncake.store"], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return last if tried.returncode else ""


def check_feature_budget(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn where a set of features is likely to need more than the budget, or all of them more than the disk has."""
    if not target.strategies:
        return  # no draft, no features
    try:
        found = estimate_new_bytes(PlanSubject.of(target.name, registry))
    except (DraftworksError, OSError):
        return  # what a plan cannot be made of is said by other checks
    where = f"target {target.name}: capture.budget_gb"
    budget = target.capture.budget_gb
    for asset, nbytes in found.items():
        needed = nbytes * (1 / GB)
        if needed.value > budget:
            findings.warning(
                f"{where}: {asset} will take about {_format(needed)}, and more than {budget:g} GB is refused. Raise it, or lower "
                "data.max_conversations or max_length"
            )
    _check_disk(target, registry, sum(found.values(), NOTHING), findings)


def _check_disk(target: TargetSpec, registry: Registry, needed: Estimate, findings: Findings) -> None:
    features = registry.load_deployment().features
    if features.kind == "s3":
        return
    root = registry.resolve_var_folder() if features.root is None else registry.resolve_path(features.root)
    existing: Path = find_existing(root)
    free = shutil.disk_usage(existing).free
    if needed.value > free:
        findings.warning(
            f"target {target.name}: its features will take about {_format(needed * (1 / GB))}, and the disk of {existing} has "
            f"{free / GB:,.1f} GB left: make room, name another (features.root), or let them stream"
        )


def _format(size: Estimate) -> str:
    return f"{size.value:.3g} GB ({size.low:.3g} to {size.high:.3g})"
