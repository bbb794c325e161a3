"""A fleet whose drafts are in service and decided about: records only, nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from decision_toys import decided
from fleets import Fleet
from service_toys import record, served

from draftworks.decision.fleet_state import FleetReader
from draftworks.decision.record import Choice, Decision, save_decision
from draftworks.service.register import ServiceRegister
from draftworks.targets.registry import Registry
from sensors.acting import CHARGE_TAG

PARTITION = "dagster/partition"


@dataclass(frozen=True)
class ActingFleet:
    root: Path

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.root)

    @property
    def var(self) -> Path:
        return self.root / "var"

    @property
    def reader(self) -> FleetReader:
        return FleetReader(Registry(self.fleet.registry))

    def set_budget(self, hours: float | None, **settings: Any) -> None:
        self.fleet.registry.mkdir(parents=True, exist_ok=True)
        budget = None if hours is None else {"gpu_hours_per_week": hours, **settings}
        (self.fleet.registry / "deployment.yaml").write_text(yaml.safe_dump({"budget": budget}))

    def add(self, target: str, choice: Choice = Choice.RETRAIN, act: str = "retrain", **decision: Any) -> Decision:
        """A target with a draft in service, and a decision about it."""
        strategy = decision.get("strategy", "eagle3")
        settings = {"act": act, **decision.pop("settings", {})}
        own = {} if strategy == "eagle3" else {"strategies": {strategy: {}}}
        self.fleet.add(target, service={}, decision=settings, **own)
        self.serve(target, "served", strategy)
        return self.decide(target, choice, **decision)

    def serve(self, target: str, draft: str, strategy: str = "eagle3") -> None:
        register = ServiceRegister(self.var, target, strategy)
        now = register.find()
        made = replace(
            record(1 if now is None else now.number + 1, draft),
            target=target,
            strategy=strategy,
            draft=served(draft, "0" * 16),
        )
        register.replace(None if now is None else now.draft.digest, lambda _: made)

    def decide(self, target: str, choice: Choice = Choice.RETRAIN, **decision: Any) -> Decision:
        digest = self.fleet.workspace.resolve_target_files(target).digest
        return save_decision(self.var, replace(decided(target, choice, **decision), target_digest=digest))


def start_run(
    instance: dg.DagsterInstance, request: dg.RunRequest, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED
) -> dg.DagsterRun:
    """A run as the daemon makes it of a request."""
    assert request.partition_key is not None
    tags = {PARTITION: request.partition_key, CHARGE_TAG: request.tags[CHARGE_TAG]}
    return instance.add_run(dg.DagsterRun(job_name=str(request.job_name), status=status, tags=tags))
