"""The job that removes what no result in use was made from."""

import dagster as dg
from pydantic import Field

from resources.workspace import Workspace
from sensors.running_targets import find_runs_under_way

JOB = "prune"


class PruneConfig(dg.Config):
    """Settings of a run."""

    remove: bool = Field(default=False, description="Remove; otherwise only say what would go.")


@dg.op(description="Remove results, features and logs that nothing in use needs; see docs/how-to/retention.md.")
def prune_results(context: dg.OpExecutionContext, config: PruneConfig, workspace: Workspace) -> None:
    from draftworks.retention.removable import Place, plan_removal
    from draftworks.retention.removal import remove_items
    from draftworks.retention.survey import survey

    place = Place.of(workspace.registry)
    found = survey(place)
    plan = plan_removal(found.totals, found.candidates, place.settings.budgets)
    for item in plan.items:
        context.log.info(f"{item.kind} {item.name} {item.owner}: {item.nbytes:,} bytes; {item.why}")
    figures = {each.kind: f"{each.removed:,} of {each.total:,} bytes" for each in plan.kinds}
    if not config.remove:
        context.add_output_metadata({"would_remove_bytes": plan.nbytes, **figures})
        return
    busy = find_runs_under_way(context.instance, besides=(JOB,))
    done = remove_items(plan, lambda: Place.of(workspace.registry), busy)
    for name, reason in done.left.items():
        context.log.info(f"left {name}: {reason}")
    context.add_output_metadata({"removed_bytes": done.nbytes, "left": len(done.left), **figures})


def make_prune_job() -> dg.JobDefinition:
    @dg.job(
        name=JOB,
        executor_def=dg.in_process_executor,
        description="Remove what no current, best, pinned or promoted result was made from.",
    )
    def prune() -> None:
        prune_results()

    return prune
