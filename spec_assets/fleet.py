"""The page of the fleet as an asset: what `draftworks page` writes, kept fresh by a schedule."""

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.storage.file_lock import hold_lock
from draftworks.storage.names import FLEET
from resources.dead_runs import end_with_run_process
from resources.workspace import Workspace
from spec_assets.common import OWNERS, translate_errors

if TYPE_CHECKING:
    from draftworks.page.contents import FleetPage


@dg.asset(
    name=FLEET,
    group_name=FLEET,
    owners=OWNERS,
    code_version="1",
    kinds={"html"},
    description="Every draft on one HTML page: what it promised, does in service, was made from, cost, and what it needs.",
)
def fleet_page(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    from draftworks.page.contents import read_page  # not when definitions are loaded
    from draftworks.page.rendering import locate_fleet_page, write_fleet_page

    end_with_run_process(context)
    path = locate_fleet_page(workspace.var)
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = "another run is writing the page of the fleet: waiting for it"
    with translate_errors(), hold_lock(path.parent / ".lock", busy):
        page = read_page(workspace.registry, time.time())
        write_fleet_page(path, page)
    return dg.MaterializeResult(metadata=_describe(page, path))


def _describe(page: "FleetPage", path: Path) -> dict[str, Any]:
    needs = Counter(row[-1] for row in page.rows)
    return {
        "page": dg.MetadataValue.path(path),
        "dagster/row_count": len(page.rows),
        "needs": dict(needs),
    }
