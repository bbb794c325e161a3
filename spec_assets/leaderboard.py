"""The leaderboard: the one asset that is about all targets. It reads what is published and depends on no run."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.fleet.leaderboard import Fleet, Standing
from draftworks.fleet.leaderboard_views import MARKDOWN, PLOT, markdown, save
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.identity import digest
from draftworks.storage.names import LEADERBOARD, of_strategy
from resources.dead_runs import end_with_run_process
from resources.workspace import Workspace
from spec_assets.common import OWNERS, translate_errors
from spec_assets.metadata import embed_picture
from spec_assets.reports import GROUP

NAME = LEADERBOARD
RESULT = "result"
DESCRIPTION = (
    "Every draft of every target: acceptance, age, the best one so far, and which inputs changed since its report and "
    "since its training."
)
MOST_ROWS = 100  # shown in the UI: every run keeps its own copy in the event log


def make_leaderboard_asset(strategies: Iterable[StrategySpec]) -> dg.AssetsDefinition:
    """Make the asset `leaderboard`, unpartitioned: in a job of one target it runs after the reports of that target.

    It is a graph whose one op takes all reports as *one* input: an asset with a dependency on each report would be
    skipped if the target does not use one of the strategies. The graph has another name than the asset, since a job
    has that name.
    """
    reports = [of_strategy(strategy.name).report for strategy in strategies]

    @dg.graph(name="ranking", ins={name: dg.GraphIn() for name in reports}, out=dg.GraphOut())
    def ranking(**published: Any) -> Any:
        return rank(list(published.values()))

    return dg.AssetsDefinition.from_graph(
        ranking,
        keys_by_input_name={name: dg.AssetKey(name) for name in reports},
        keys_by_output_name={RESULT: dg.AssetKey(NAME)},
        group_name=GROUP,
        descriptions_by_output_name={RESULT: DESCRIPTION},
        owners_by_output_name={RESULT: OWNERS},
        code_versions_by_output_name={RESULT: "1"},
        tags_by_output_name={RESULT: {"dagster/kind/pandas": ""}},
    )


@dg.op(
    ins={"reports": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing), description="Reads all reports and publishes the table."
)
def rank(context: dg.OpExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    end_with_run_process(context)
    folder = workspace.var / NAME
    folder.mkdir(parents=True, exist_ok=True)
    busy = "another run is writing the leaderboard: waiting for it"
    with translate_errors(), hold_lock(folder / ".lock", busy) as lease:  # the run that writes last has read last
        now = time.time()
        standings = Fleet(workspace.registry, workspace.artifacts, workspace.digests).standings()
        lease.confirm()
        save(folder, standings, now)
        return dg.MaterializeResult(
            asset_key=NAME,
            data_version=dg.DataVersion(digest([asdict(standing) for standing in standings])),
            metadata=describe_leaderboard(standings, folder),
        )


def describe_leaderboard(standings: list[Standing], folder: Path) -> dict[str, Any]:
    measured = [standing.latest.created for standing in standings if standing.latest is not None]
    bars, hidden = folder / PLOT, len(standings) - MOST_ROWS
    more = f"\n{hidden:,} more in {folder / MARKDOWN}\n" if hidden > 0 else ""
    return {
        "leaderboard": dg.MetadataValue.md(markdown(standings[:MOST_ROWS]) + more),
        "dagster/row_count": len(standings),
        "stale": sum(bool(standing.stale_against) for standing in standings),
        "stale_drafts": sum(bool(standing.draft_changes) for standing in standings),
        "without_a_report": sum(standing.latest is None for standing in standings),
        **({"acceptance": embed_picture(bars, NAME)} if bars.exists() else {}),
        **({"newest_report": dg.MetadataValue.timestamp(max(measured))} if measured else {}),
        "path": dg.MetadataValue.path(folder.relative_to(folder.parents[1])),
    }
