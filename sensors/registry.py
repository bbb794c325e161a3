"""The sensor that requests the job `resolve` for targets whose inputs have changed."""

from collections.abc import Sequence

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.storage.identity import digest
from draftworks.targets.registry import resolve_recipe
from resources.workspace import Workspace
from sensors.series import SeriesCursor


def make_registry_sensor(targets: Sequence[str]) -> dg.SensorDefinition:
    """Return the sensor over the targets that are partitions of the code location; a target added later needs a
    reload."""

    @dg.sensor(
        name="registry_sensor",
        job_name="resolve",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Resolves a target again when its weights, tokenizer, data files or options have changed.",
    )
    def resolve(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        return request_moved(context, workspace, targets)

    return resolve


def request_moved(
    context: dg.SensorEvaluationContext, workspace: Workspace, targets: Sequence[str]
) -> dg.SensorResult | dg.SkipReason:
    """Request `resolve` for each target whose weights, tokenizer, data files or options have changed.

    Digests are remembered by size, mtime, inode and ctime, so that a tick reads no weights that did not change.
    """
    cursor = SeriesCursor.read(context.cursor)
    known = cursor.entries
    seen = dict(known)  # includes targets that are gone for now, since they may come back
    for target in targets:
        try:
            found = digest_inputs(workspace, target)
        except DraftworksError as error:
            context.log.warning(str(error))
            continue
        before = known.get(target, {"digest": None, "moves": 0})
        moved = found != before["digest"]
        seen[target] = {"digest": found, "moves": before["moves"] + moved}
    # The count is part of the run key: Dagster never repeats a key, and inputs may return to an earlier state.
    requests = [
        dg.RunRequest(run_key=cursor.name_run(target, now["digest"], now["moves"]), partition_key=target)
        for target, now in seen.items()
        if now != known.get(target)
    ]
    if not requests:
        return dg.SkipReason("no target's inputs have changed")
    return dg.SensorResult(run_requests=requests, cursor=cursor.write(seen))


def digest_inputs(workspace: Workspace, target: str) -> str:
    """Return one digest of all inputs of a target."""
    registry = workspace.registry
    spec = registry.load_target(target)
    files = workspace.resolve_target_files(target)
    data = workspace.read_training_data_version(spec)
    return digest([files.digest, files.tokenizer_digest, data, resolve_recipe(spec, registry)])
