"""The plan that a run began with, kept to be compared with what it took: `var/plans/TARGET/plan.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.planning.estimates import RANK, Estimate, Source
from draftworks.planning.plan import Plan
from draftworks.planning.subject import PlanSubject
from draftworks.storage.artifacts import Artifact
from draftworks.storage.asset_names import TRAINING_FEATURES
from draftworks.storage.atomic import publish_file
from draftworks.storage.names import require_name
from draftworks.storage.regular_files import read_json

SCHEMA = 1


@dataclass(frozen=True)
class SavedStep:
    """One step of a saved plan.

    Attributes:
        nbytes: of the features that it was to store.
    """

    asset: str
    seconds: Estimate
    devices: int
    nbytes: Estimate
    source: Source


@dataclass(frozen=True)
class SavedPlan:
    """A target's plan of the way that its entry asked for, with the steps that were not there at that time.

    Attributes:
        identity: of the plan, see `identify_plan`.
        made_at: seconds since the epoch.
    """

    identity: str
    made_at: float
    steps: tuple[SavedStep, ...]


@dataclass(frozen=True)
class StepActual:
    """What a planned step took.

    Attributes:
        seconds, nbytes: None where the result does not exist yet, or stores no features.
    """

    step: SavedStep
    seconds: float | None
    nbytes: int | None = None

    @property
    def ratio(self) -> float | None:
        """Actual seconds over planned ones."""
        planned = self.step.seconds.value
        return None if self.seconds is None or not planned else self.seconds / planned


def locate_plan(var: Path, target: str) -> Path:
    return var / "plans" / require_name(target) / "plan.json"


def save_plan(var: Path, plan: Plan) -> bool:
    """Save a target's plan for the comparison, and return whether it was.

    It is not where nothing is left to do, and where a plan of the same identity is there: a run that goes on after an
    interruption is compared with the plan of its beginning.
    """
    steps = tuple(
        SavedStep(each.asset, each.seconds, each.devices, each.nbytes, each.source)
        for each in plan.chosen.steps
        if not each.is_made and each.seconds.value
    )
    path = locate_plan(var, plan.targets[0])
    if not steps or (path.exists() and _read_identity(path) == plan.identity):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"schema": SCHEMA, **asdict(SavedPlan(plan.identity, plan.made_at, steps))}
    with publish_file(path) as staging:
        staging.write_text(json.dumps(saved, indent=1))
    return True


def load_plan(var: Path, target: str) -> SavedPlan | None:
    """Return the saved plan of a target; None if there is none.

    Raises:
        StoreError: the file is damaged.
    """
    path = locate_plan(var, target)
    try:
        found = read_json(path)
        if found["schema"] != SCHEMA:
            raise StoreError(f"{path}: schema {found['schema']!r}, expected {SCHEMA}")
        steps = tuple(_parse_step(each) for each in found["steps"])
        return SavedPlan(str(found["identity"]), float(found["made_at"]), steps)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: not a saved plan ({error}). Remove it: the next run saves another") from error


def compare_plan(saved: SavedPlan, subject: PlanSubject) -> tuple[StepActual, ...]:
    """Return each step of a saved plan beside the first result that was made after it was saved."""
    found: list[StepActual] = []
    for step in saved.steps:
        made = [each for each in subject.list_results(step.asset) if each.created >= saved.made_at]
        found.append(StepActual(step, None) if not made else _measure_actual(step, made[-1]))
    return tuple(found)


def _measure_actual(step: SavedStep, made: Artifact) -> StepActual:
    stores = step.asset == TRAINING_FEATURES or step.asset.endswith("_eval_features")
    nbytes = made.summary.get("bytes") if stores and step.nbytes.value else None
    return StepActual(step, made.seconds, nbytes)


def _read_identity(path: Path) -> str | None:
    try:
        return read_json(path)["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged: replaced


def _parse_step(found: Any) -> SavedStep:
    kind = found["source"]["kind"]
    if kind not in RANK:
        raise ValueError(f"source kind {kind!r}")
    return SavedStep(
        asset=require_name(found["asset"]),
        seconds=Estimate.from_json(found["seconds"]),
        devices=int(found["devices"]),
        nbytes=Estimate.from_json(found["nbytes"]),
        source=Source(kind, str(found["source"]["text"])),
    )
