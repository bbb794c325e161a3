"""Finds the steps of a run whose results exist already. They run in the run's process, since a new process costs more.

The function of the asset is called with an artifact store that does not build: it reports whether the current result
is of the identity that the function computed. If that is not known at once (a file would have to be read for its
digest, an error), the step gets a process of its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg

from draftworks.config.strategies import list_strategies
from draftworks.preflight.examine import is_examined
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import FileDigests, RememberedDigests
from draftworks.storage.names import DATASET, LEADERBOARD, RECIPE, TARGET_MODEL, of_strategy
from draftworks.targets.weights import is_checked
from resources.workspace import Workspace
from spec_assets.inputs import read_data_versions

log = logging.getLogger(__name__)


class Probed(Exception):
    """Ends the function of an asset where it would obtain its result; `unchanged` if the result exists."""

    def __init__(self, unchanged: bool) -> None:
        self.unchanged = unchanged


class ProbeStore(ArtifactStore):
    """Artifact store that builds nothing: `obtain` raises `Probed` with whether the current result has the identity."""

    def obtain(self, asset: str, target: str, identity: dict[str, Any], *_: Any, **options: Any) -> Artifact:
        raise Probed(self.is_current(asset, target, identity, options.get("still_good")))


class ProbeWorkspace(Workspace):
    """Workspace for probing asset functions: it builds nothing and reads no large file."""

    @cached_property
    def artifacts(self) -> ArtifactStore:
        return ProbeStore(self.var, self.digests)

    @cached_property
    def digests(self) -> FileDigests:
        return RememberedDigests(self.var / "digests.json")


def find_unchanged_steps(
    plan: Any, job: dg.JobDefinition, target: str, run_config: Mapping[str, Any], root: Path
) -> list[str]:
    """Return the keys of the unchanged steps that come after unchanged steps only, in topological order.

    Args:
        root: folder of the registry.
    """
    workspace = ProbeWorkspace(registry_root=str(root))
    before, found = plan.get_executable_step_deps(), list[str]()
    if run_config.get("ops"):  # overrides, which the first step examines
        return []
    for step in plan.get_steps_to_execute_in_topo_order():
        if before[step.key] <= set(found) and _is_unchanged(step, job, workspace, target):
            found.append(step.key)
    return found


def _is_unchanged(step: Any, job: dg.JobDefinition, workspace: ProbeWorkspace, target: str) -> bool:
    definition = job.asset_layer.get_assets_def_for_node(step.node_handle)
    if definition is None or not definition.keys:  # a check looks at the result of a step that is among those already
        return True
    names = {key.to_user_string() for key in definition.keys}
    acting = ({each.promoted, each.decision, each.observed} for each in map(of_strategy, list_strategies()))
    if names & set().union(*acting):
        return False  # its function must not be called to probe it
    check = next((found for name, found in INPUT_CHECKS.items() if name in names), None)
    try:
        return ask_asset(definition, workspace, target) if check is None else check(workspace, target)
    except Exception as error:
        log.debug("%s is executed in a process of its own: %r", step.key, error)
        return False


def ask_asset(definition: dg.AssetsDefinition, workspace: ProbeWorkspace, target: str) -> bool:
    compute: Any = definition.op.compute_fn
    function = inspect.unwrap(compute.decorated_fn)
    context = SimpleNamespace(
        asset_key=definition.key, assets_def=definition, partition_key=target, log=log, retry_number=0
    )
    given = {"context": context, "workspace": workspace}
    parameters = inspect.signature(function).parameters
    if "config" in parameters:
        given["config"] = parameters["config"].annotation()
    try:
        function(**{name: given.get(name) for name in parameters})
    except Probed as answer:
        return answer.unchanged
    return False


def _is_known_target(workspace: ProbeWorkspace, name: str) -> bool:
    """Whether the target's files were digested and examined already, together with its data."""
    target, registry = workspace.registry.load_target(name), workspace.registry
    files = workspace.resolve_target_files(name)
    examined = is_examined(target, files, registry, read_data_versions(workspace, target), workspace.target_checks)
    return examined and is_checked(files, target.capture.backend, workspace.weight_checks)


def _is_known_dataset(workspace: ProbeWorkspace, name: str) -> bool:
    registry = workspace.registry
    return bool(workspace.read_training_data_version(registry.load_target(name)))


def _assume_unchanged(workspace: ProbeWorkspace, name: str) -> bool:
    """Return True: for steps that cost less than starting a process."""
    return True


INPUT_CHECKS: dict[str, Callable[[ProbeWorkspace, str], bool]] = {
    TARGET_MODEL: _is_known_target,
    DATASET: _is_known_dataset,
    RECIPE: _assume_unchanged,
    LEADERBOARD: _assume_unchanged,
}
"""Checks by asset name, for the steps that store no result with an identity."""
