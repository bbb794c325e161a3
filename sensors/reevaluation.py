"""The sensors that request new reports when inputs of the newest have changed, and reload a changed registry."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import Subject, find_published_drafts
from draftworks.storage.identity import digest
from draftworks.storage.names import CONVERSATIONS, of_eval_set
from draftworks.storage.words import list_names
from draftworks.targets.gguf_store import NotConvertedError
from draftworks.targets.registry import HELDOUT, resolve_recipe
from draftworks.targets.resolve import identify_inputs
from draftworks.targets.training_data import identify_eval_data
from resources.workspace import Workspace
from sensors.running_targets import SeriesCursor, find_runs_under_way

BECAUSE_TAG = "draftworks/because"


@dataclass(frozen=True)
class CursorEntry:
    """The cursor's entry of a target.

    Attributes:
        subject: identity of the state for which an evaluation was requested; None once the reports are current.
        times: number of requests. It is part of the run key, since Dagster never repeats a key, and a target may return
            to an earlier state.
    """

    subject: str | None = None
    times: int = 0


@dataclass(frozen=True)
class StaleTarget:
    """A target whose reports are stale: the identity of its current state, and descriptions of what has changed."""

    subject: str
    changes: list[str]


def make_reevaluation_sensor(
    targets: Sequence[str], status: dg.DefaultSensorStatus, interval_s: int = 60
) -> dg.SensorDefinition:
    """Return the sensor over the targets that are partitions of the code location."""

    @dg.sensor(
        name="reevaluation_sensor",
        job_name="evaluate",
        minimum_interval_seconds=interval_s,
        default_status=status,
        description="Evaluates again where target, eval data or draft is not what the newest report was made from.",
    )
    def reevaluate(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult:
        cursor = SeriesCursor.read(context.cursor)
        before = {target: CursorEntry(**entry) for target, entry in cursor.entries.items()}
        # Includes targets that are gone for now: if one comes back, its run keys must not repeat earlier ones.
        after = dict(before)
        requests = []
        # Read before the results: what a run publishes during this tick is left to the next tick.
        busy = set(find_runs_under_way(context.instance))
        for target in targets:
            known = after[target] = before.get(target, CursorEntry())
            if target in busy:
                continue  # that run may be making the missing report
            try:
                found = find_outdated(workspace, target)
            except DraftworksError as error:
                context.log.warning(str(error))
                continue
            after[target] = CursorEntry(None if found is None else found.subject, known.times)
            if found is not None and found.subject != known.subject:
                after[target] = CursorEntry(found.subject, known.times + 1)
                requests.append(make_request(target, after[target], found.changes, cursor))
        return dg.SensorResult(
            run_requests=requests,
            cursor=cursor.write({name: asdict(entry) for name, entry in after.items() if entry != CursorEntry()}),
            skip_reason=None if requests else explain_skip({target: after[target] for target in targets}, busy),
        )

    return reevaluate


def find_outdated(workspace: Workspace, target: str) -> StaleTarget | None:
    """Return what is stale in a target's reports; None if nothing is, or if there is no draft to measure yet."""
    registry, artifacts = workspace.registry, workspace.artifacts
    spec = registry.load_target(target)
    drafts = find_published_drafts(artifacts, spec)
    responses = {name: artifacts.find(of_eval_set(name).responses, target) for name in [HELDOUT, *spec.evals]}
    if not drafts or responses[HELDOUT] is None:
        return None
    try:
        files, names = workspace.resolve_target_files(target), list(spec.evals)
    except NotConvertedError as other:  # so it is none that anything was measured with
        return StaleTarget(other.identity, ["weights of the target"])
    if artifacts.find(CONVERSATIONS, target) is not None:
        names.append(HELDOUT)
    sources = {name: identify_eval_data(name, spec, files.vocab_size, registry, workspace.digests) for name in names}
    subject = Subject(files, drafts, responses, sources)
    changes = subject.changes(artifacts)
    return StaleTarget(subject.identity, changes) if changes else None


def make_request(target: str, entry: CursorEntry, changes: list[str], cursor: SeriesCursor) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=cursor.name_run(target, entry.subject, entry.times),
        partition_key=target,
        tags={BECAUSE_TAG: f"changed: {', '.join(changes)}"},
    )


def explain_skip(after: dict[str, CursorEntry], busy: set[str]) -> str:
    """Return why this tick starts no run, with the targets that a user may wait for."""
    failed = sorted(target for target, entry in after.items() if entry.subject is not None and target not in busy)
    waiting = sorted(busy & after.keys())
    reasons = ["no report is outdated"]
    if failed:
        reasons.append(
            f"evaluated once without a new report, and not again before another change: {list_names(failed, 10)}"
        )
    if waiting:
        reasons.append(f"checked again when their runs have ended: {list_names(waiting, 10)}")
    return "; ".join(reasons)


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
    files = identify_inputs(spec, registry, workspace.digests)
    data = workspace.read_training_data_version(spec)
    return digest([*files, data, resolve_recipe(spec, registry)])
