"""The plan of a target's drafts: for each way to keep features its steps, bytes, GPU-hours and money."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftworks.config.prices import PricesSpec
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.errors import ConfigError
from draftworks.planning.amounts import TRAIN, Amount, count_amounts
from draftworks.planning.estimates import NOTHING, Estimate
from draftworks.planning.steps import WAYS, PlannedStep, StepPlanner, Way
from draftworks.planning.subject import PlanSubject
from draftworks.storage.identity import digest
from draftworks.targets.registry import HELDOUT
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
        own: the way that the target's entry asks for.
        thinking_comparison: seconds of `compare_thinking`, which no other job makes; in no sum of this plan.
    """

    targets: tuple[str, ...]
    strategies: tuple[str, ...]
    identity: str
    made_at: float
    own: Way
    amounts: Mapping[str, Amount]
    ways: Mapping[Way, WayPlan]
    prices: PricesSpec | None = None
    thinking_comparison: Estimate = NOTHING

    @property
    def chosen(self) -> WayPlan:
        """The plan of the way that the target's entry asks for."""
        return self.ways[self.own]

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
                f"target {target.name} does not use the strategy {name!r}; it uses: {', '.join(target.strategies)}"
            )
    settings = {name: target.strategies[name].training for name in chosen} | dict(trainings or {})
    amounts = count_amounts(subject)
    planners: dict[Way, StepPlanner] = {way: StepPlanner(subject, amounts, way, chosen, settings, anew) for way in WAYS}
    return Plan(
        targets=(target.name,),
        strategies=chosen,
        identity=identify_plan(subject),
        made_at=time.time(),
        own=choose_way(target),
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
    model = [] if target.is_hub else sorted(subject.registry.resolve_path(target.model).glob("*.safetensors"))
    data = [] if subject.is_remote(HELDOUT) else find_training_files(target, subject.registry)
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in (*model, *data)]
    return digest([entry, stamps])


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
        own=first.own,
        amounts={f"{plan.targets[0]} {TRAIN}": plan.amounts[TRAIN] for plan in plans},
        ways=ways,
        prices=first.prices,
        thinking_comparison=sum((plan.thinking_comparison for plan in plans), NOTHING),
    )


def _plan_way(planner: StepPlanner) -> WayPlan:
    steps = tuple(planner.list_steps())
    gate = NOTHING if planner.way != "fp8" or planner.asks_for_fp8 else planner.plan_gate().seconds
    return WayPlan(planner.way, planner.capture.storage, steps, planner.count_peak_bytes(steps), gate)
