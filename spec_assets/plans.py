"""The plan of a target on the pages of its recipes, and the copy that a run is compared with afterwards."""

import logging
from typing import Any

from draftworks.errors import DraftworksError
from draftworks.storage.asset_names import of_strategy
from resources.workspace import Workspace
from spec_assets.metadata import format_table

log = logging.getLogger(__name__)


def describe_plans(workspace: Workspace, target: str) -> dict[str, dict[str, Any]]:
    """Return metadata for each `{strategy}_recipe`, and save the plan for the comparison of what the run takes.

    A plan decides nothing, so one that cannot be made is a word in the log and ends no run.
    """
    from draftworks.planning.plan import make_plan  # one step of a run plans, and every process loads this module
    from draftworks.planning.plan_table import build_header, build_rows
    from draftworks.planning.saved_plan import compare_plan, load_plan, save_plan
    from draftworks.planning.subject import PlanSubject

    try:
        subject = PlanSubject.of(target, workspace.registry)
        saved = load_plan(workspace.var, target)
        actual = () if saved is None else compare_plan(saved, subject)
        found: dict[str, dict[str, Any]] = {}
        for strategy in subject.target.strategies:
            plan = make_plan(subject, [strategy])
            assets = {step.asset for way in plan.ways.values() for step in way.steps}
            took = [each for each in actual if each.step.asset in assets and each.seconds is not None]
            table = format_table(build_header(plan, took), build_rows(plan, took))
            found[of_strategy(strategy).recipe] = {"plan": table, "gpu_hours_left": plan.chosen.gpu_hours.value}
        save_plan(workspace.var, make_plan(subject))
        return found
    except DraftworksError as error:
        log.warning("the plan of target %s cannot be shown: %s", target, error)
    except Exception:  # a figure for people must not end a run
        log.warning("the plan of target %s cannot be shown", target, exc_info=True)
    return {}
