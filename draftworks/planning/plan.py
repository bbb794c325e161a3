"""The plan of a target's drafts: for each way to keep features its steps, bytes, GPU-hours and money."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftworks.config.operations import PricesSpec
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.errors import ConfigError, StoreError
from draftworks.planning.amounts import TRAIN, Amount, count_amounts
from draftworks.planning.estimates import NOTHING, RANK, Estimate, Source
from draftworks.planning.steps import WAYS, PlannedStep, StepPlanner, Way
from draftworks.planning.subject import PlanSubject
from draftworks.storage.artifacts import Artifact
from draftworks.storage.files import publish_file, read_json
from draftworks.storage.identity import digest
from draftworks.storage.names import TRAINING_FEATURES, require_name
from draftworks.storage.words import suggest_or_list
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.training_data import find_training_files

GB = 1e9


@dataclass(frozen=True)
class WayPlan:
    """What the drafts cost with one way to keep features.

    Attributes:
        storage: encoding of the training features, as `capture.storage`.
        peak_bytes: of features that are stored at most.
        unasked_gate: seconds of the comparison that fp8 needs first, where the target's entry does not ask for fp8; in no
            sum of this plan.
    """

    way: Way
    storage: str
    steps: tuple[PlannedStep, ...]
    peak_bytes: Estimate
    unasked_gate: Estimate = NOTHING

    @property
    def nbytes(self) -> Estimate:
        """Bytes of the features that stay, those that exist already included."""
        return sum((each.nbytes for each in self.steps), NOTHING)

    @property
    def new_bytes(self) -> Estimate:
        """Bytes of the features that are not stored yet."""
        return sum((each.new_bytes for each in self.steps), NOTHING)

    @property
    def hours(self) -> Estimate:
        """Hours of the steps one after the other, without waiting for a place."""
        return sum((each.seconds for each in self.steps), NOTHING) * (1 / 3600)

    @property
    def gpu_hours(self) -> Estimate:
        return sum((each.gpu_hours for each in self.steps), NOTHING)

    def find_step(self, asset: str) -> PlannedStep | None:
        return next((each for each in self.steps if each.asset == asset), None)


@dataclass(frozen=True)
class Money:
    """What a plan costs, in the currency of the deployment.

    Attributes:
        compute: of all GPU-hours, once.
        storage_month: of the features that stay, for each month.
    """

    currency: str
    compute: Estimate
    storage_month: Estimate


@dataclass(frozen=True)
class Plan:
    """The plan of one target, or of several.

    Attributes:
        identity: digest of what is planned, see `identify_plan`. Figures of what exists are not in it.
        made_at: seconds since the epoch.
        chosen_way: the way that the target's entry asks for.
        thinking_comparison: seconds of `compare_thinking`, which no other job makes; in no sum of this plan.
    """

    targets: tuple[str, ...]
    strategies: tuple[str, ...]
    identity: str
    made_at: float
    chosen_way: Way
    amounts: Mapping[str, Amount]
    ways: Mapping[Way, WayPlan]
    prices: PricesSpec | None = None
    thinking_comparison: Estimate = NOTHING

    @property
    def chosen(self) -> WayPlan:
        """The plan of the way that the target's entry asks for."""
        return self.ways[self.chosen_way]

    def price(self, way: Way) -> Money | None:
        """Return the money that a way costs; None if the deployment names no prices."""
        if self.prices is None:
            return None
        plan, prices = self.ways[way], self.prices
        return Money(prices.currency, plan.gpu_hours * prices.gpu_hour, plan.nbytes * (prices.storage_gb_month / GB))


def estimate_new_bytes(subject: PlanSubject) -> dict[str, Estimate]:
    """Return the bytes of each set of features that a run of the entry would store, by its asset. Raises as `make_plan`."""
    trainings = {name: entry.training for name, entry in subject.target.strategies.items()}
    way = choose_way(subject.target)
    return StepPlanner(subject, count_amounts(subject), way, tuple(trainings), trainings).estimate_new_bytes()


def make_plan(
    subject: PlanSubject,
    strategies: Sequence[str] = (),
    trainings: Mapping[str, TrainingSpec] | None = None,
    anew: bool = False,
) -> Plan:
    """Plan the drafts of a target.

    Args:
        strategies: of the target; all of them by default. What all strategies share is planned whole.
        trainings: settings of trainings that differ from the registry's.
        anew: the drafts are trained again, even if they exist.

    Raises:
        ConfigError: a strategy that the target does not use, or nothing is known of the size of its data.
        DataError: a data set has no files.
    """
    target = subject.target
    chosen = tuple(strategies) or tuple(target.strategies)
    for name in chosen:
        if name not in target.strategies:
            raise ConfigError(
                f"target {target.name} does not use the strategy {name!r}; {suggest_or_list(name, target.strategies)}"
            )
    settings = {name: target.strategies[name].training for name in chosen} | dict(trainings or {})
    amounts = count_amounts(subject)
    planners: dict[Way, StepPlanner] = {way: StepPlanner(subject, amounts, way, chosen, settings, anew) for way in WAYS}
    return Plan(
        targets=(target.name,),
        strategies=chosen,
        identity=identify_plan(subject),
        made_at=time.time(),
        chosen_way=choose_way(target),
        amounts=amounts,
        ways={way: _plan_way(planner) for way, planner in planners.items()},
        prices=subject.registry.load_deployment().prices,
        thinking_comparison=planners["stored"].estimate_thinking_comparison(),
    )


def choose_way(target: TargetSpec) -> Way:
    """Return the way to keep features that a target's entry asks for."""
    if target.streaming is not None:
        return "streamed"
    return "stored" if target.capture.storage == "plain" else "fp8"


def identify_plan(subject: PlanSubject) -> str:
    """Return the digest of what decides the work: the target's entry, and names, sizes and times of its files and data.

    It is known before any file is read, and the same when a run goes on that was interrupted.
    """
    target = subject.target
    entry = target.model_dump(mode="json", exclude={"description", "service", "launcher"})
    model = [] if target.is_hub else _list_weights(subject.registry.resolve_path(target.model))
    data = [] if subject.is_remote(HELDOUT) else find_training_files(target, subject.registry)
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in (*model, *data)]
    return digest([entry, stamps])


def _list_weights(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def add_plans(plans: Sequence[Plan]) -> Plan:
    """Return the sum of the plans of several targets. What targets share is counted once, where it is largest."""
    first = plans[0]
    ways: dict[Way, WayPlan] = {}
    for way in WAYS:
        steps: dict[str, PlannedStep] = {}
        for each in (step for plan in plans for step in plan.ways[way].steps):
            known = steps.get(each.key)
            if known is None or each.gpu_hours.value > known.gpu_hours.value:
                steps[each.key] = each
        peak = sum((plan.ways[way].peak_bytes for plan in plans), NOTHING)
        stored = sum((each.nbytes for each in steps.values()), NOTHING)
        storages = dict.fromkeys(plan.ways[way].storage for plan in plans)
        together = peak if way == "streamed" else stored
        gates = sum((plan.ways[way].unasked_gate for plan in plans), NOTHING)
        ways[way] = WayPlan(way, ", ".join(storages), tuple(steps.values()), together, gates)
    return Plan(
        targets=tuple(name for plan in plans for name in plan.targets),
        strategies=tuple(dict.fromkeys(name for plan in plans for name in plan.strategies)),
        identity=digest([plan.identity for plan in plans]),
        made_at=first.made_at,
        chosen_way=first.chosen_way,
        amounts={f"{plan.targets[0]} {TRAIN}": plan.amounts[TRAIN] for plan in plans},
        ways=ways,
        prices=first.prices,
        thinking_comparison=sum((plan.thinking_comparison for plan in plans), NOTHING),
    )


def _plan_way(planner: StepPlanner) -> WayPlan:
    steps = tuple(planner.list_steps())
    gate = NOTHING if planner.way != "fp8" or planner.asks_for_fp8 else planner.plan_gate().seconds
    return WayPlan(planner.way, planner.capture.storage, steps, planner.count_peak_bytes(steps), gate)


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


def estimate_gpu_hours(
    registry: Registry, target: str, strategy: str, training: TrainingSpec | None = None
) -> Estimate:
    """Return the GPU-hours of training a draft again as the registry says: missing answers and features, the training
    itself, its evaluation and its export. A process on the CPU counts as a GPU.

    Nothing is computed but by records of earlier results, so it costs milliseconds. No weights are read.

    Args:
        training: settings in place of the registry's, such as fewer steps for a tune that goes on from the draft in
            service. By default those of the registry, as a training from the start has them.

    Raises:
        ConfigError: the target's entry is invalid, has no such strategy, or nothing is known of the size of its data.
        DataError: a data set has no files.
    """
    subject = PlanSubject.of(target, registry)
    trainings = {} if training is None else {strategy: training}
    return make_plan(subject, [strategy], trainings, anew=True).chosen.gpu_hours
