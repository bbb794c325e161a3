"""Notices that a target's reports were made from something else than what is there now, and asks for new ones."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import Subject, published_drafts
from draftworks.storage.asset_names import of_eval_set
from draftworks.targets.registry import HELDOUT
from resources.workspace import Workspace
from sensors.under_way import runs_under_way

BECAUSE_TAG = "draftworks/because"


@dataclass(frozen=True)
class Asked:
    """What the cursor keeps of a target.

    Attributes:
        subject: identity of what was asked to be evaluated; None once the reports are of what is there.
        times: how often something was asked. It makes a key of its own of a subject that comes back to what it once
            was: Dagster never repeats a key.
    """

    subject: str | None = None
    times: int = 0


@dataclass(frozen=True)
class Outdated:
    """A target whose reports are not of what is there: what they should be of, and what has changed."""

    subject: str
    changes: list[str]


def reevaluation_sensor(
    targets: Sequence[str], status: dg.DefaultSensorStatus, interval_s: int = 60
) -> dg.SensorDefinition:
    """The sensor over the targets that the code location knows as partitions."""

    @dg.sensor(
        name="reevaluation_sensor",
        job_name="evaluate",
        minimum_interval_seconds=interval_s,
        default_status=status,
        description="Evaluates again where target, eval data or draft is not what the newest report was made from.",
    )
    def reevaluate(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult:
        before = asked_before(context.cursor)
        # Of a target that is gone for now too: should it come back, what was asked then is no key for anything new.
        after = dict(before)
        requests = []
        # Before anything is looked at: what a run publishes while this tick looks is left to the next tick.
        busy = set(runs_under_way(context.instance))
        for target in targets:
            known = after[target] = before.get(target, Asked())
            if target in busy:
                continue  # it may be about to make the very report that is missing
            try:
                found = outdated(workspace, target)
            except DraftworksError as error:
                context.log.warning(str(error))
                continue
            after[target] = Asked(None if found is None else found.subject, known.times)
            if found is not None and found.subject != known.subject:
                after[target] = Asked(found.subject, known.times + 1)
                requests.append(request(target, after[target], found.changes))
        return dg.SensorResult(
            run_requests=requests,
            cursor=json.dumps({name: asdict(asked) for name, asked in after.items() if asked != Asked()}),
            skip_reason=None if requests else nothing_to_ask({target: after[target] for target in targets}, busy),
        )

    return reevaluate


def asked_before(cursor: str | None) -> dict[str, Asked]:
    return {target: Asked(**entry) for target, entry in json.loads(cursor or "{}").items()}


def outdated(workspace: Workspace, target: str) -> Outdated | None:
    """None where the reports are of what is there, or where there is nothing to measure yet."""
    registry, artifacts = workspace.registry, workspace.artifacts
    spec = registry.load_target(target)
    drafts = published_drafts(artifacts, spec)
    responses = {name: artifacts.find(of_eval_set(name).responses, target) for name in [HELDOUT, *spec.evals]}
    if not drafts or responses[HELDOUT] is None:
        return None
    sources = {
        name: workspace.dataset_version(registry.load_dataset(registry.load_eval_set(name).dataset))
        for name in spec.evals
    }
    subject = Subject(workspace.target_files(target), drafts, responses, sources)
    changes = subject.changes(artifacts)
    return Outdated(subject.identity, changes) if changes else None


def request(target: str, asked: Asked, changes: list[str]) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"{target}:{asked.subject}:{asked.times}",
        partition_key=target,
        tags={BECAUSE_TAG: f"changed: {', '.join(changes)}"},
    )


def nothing_to_ask(after: dict[str, Asked], busy: set[str]) -> str:
    """Why this tick starts nothing, with the targets that a person may wait for."""
    failed = sorted(target for target, asked in after.items() if asked.subject is not None and target not in busy)
    waiting = sorted(busy & after.keys())
    reasons = ["no report is to be made again"]
    if failed:
        reasons.append(f"evaluated once without a new report, and not again until something changes: {_some(failed)}")
    if waiting:
        reasons.append(f"looked at when their runs have ended: {_some(waiting)}")
    return "; ".join(reasons)


def _some(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
