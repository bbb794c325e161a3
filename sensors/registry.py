"""Notices that a target's inputs are no longer what was last recorded, and asks for them to be resolved again."""

import json

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.identity import digest
from draftworks.registry import resolved_options
from resources.workspace import Workspace


@dg.sensor(job_name="resolve", minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.STOPPED)
def registry_sensor(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
    """Requests `resolve` for each target whose weights, tokenizer, data files or options have changed.

    Digests are remembered by size, mtime and inode, so that a tick reads no weights that did not change.
    """
    known: dict[str, dict] = json.loads(context.cursor) if context.cursor else {}
    seen: dict[str, dict] = {}
    for target in workspace.registry.target_names():
        try:
            found = inputs_digest(workspace, target)
        except DraftworksError as error:
            context.log.warning(str(error))
            if target in known:
                seen[target] = known[target]
            continue
        before = known.get(target, {"digest": None, "moves": 0})
        moved = found != before["digest"]
        seen[target] = {"digest": found, "moves": before["moves"] + moved}
    # The count makes a key of its own of inputs that come back to what they once were: Dagster never repeats a key.
    requests = [
        dg.RunRequest(run_key=f"{target}:{now['digest']}:{now['moves']}", partition_key=target)
        for target, now in seen.items()
        if now != known.get(target)
    ]
    if not requests:
        return dg.SkipReason("every target's inputs are as recorded")
    return dg.SensorResult(run_requests=requests, cursor=json.dumps(seen, sort_keys=True))


def inputs_digest(workspace: Workspace, target: str) -> str:
    """One digest over everything a user gives for a target."""
    registry = workspace.registry
    spec = registry.target(target)
    files = workspace.target_files(target)
    data = workspace.dataset_version(registry.dataset(spec.dataset))
    return digest([files.digest, files.tokenizer_digest, data, resolved_options(spec)])
