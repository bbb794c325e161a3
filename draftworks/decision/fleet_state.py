"""The state of a fleet that decides which trainings start, read from registry and results. Torch-free.

For a tick over a thousand targets: an entry is only read where its decision calls for something, and a target's weights
are only looked at where a training would start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from draftworks.config.launchers import merge_launcher
from draftworks.config.operations import DecisionSpec, DeploymentSpec
from draftworks.decision.budget import BudgetFile, Ledger
from draftworks.decision.queue import Action, FleetState, Step, TargetState, plan_actions
from draftworks.decision.record import FOLDER, RECORD, AnswerFile, Answers, Choice, Decision, find_decision
from draftworks.errors import DraftworksError, StoreError
from draftworks.service.register import ServiceRegister
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target


@dataclass(frozen=True)
class Outdated:
    """A decision about a draft or report that is not the present one.

    Attributes:
        reason: in words.
        facts: digests of the draft in service and of the newest report: what is to be decided about instead.
        blocks: whether nothing may start because of it; a newer report alone may lead to the same decision.
    """

    reason: str
    facts: str
    blocks: bool


@dataclass(frozen=True)
class FleetReader:
    """Reads the state of all targets of a registry that have a decision.

    Attributes:
        digests: of targets' weights, for decisions that would start something; by default files that changed are read.
    """

    registry: Registry
    digests: FileDigests | None = None

    @property
    def budget_file(self) -> BudgetFile:
        return BudgetFile(self.registry.resolve_var_folder())

    def read(self, busy: Mapping[str, str], without: Collection[str] = ()) -> FleetState:
        """Return the state now.

        Args:
            busy: by target, the run that is queued or works for it, in words.
            without: ids of charges to leave out.

        Raises:
            StoreError: the ledger or the answers are damaged.
        """
        var = self.registry.resolve_var_folder()
        deployment = self.registry.load_deployment()
        ledger = BudgetFile(var).read()
        known = set(self.registry.list_targets())
        damaged: list[str] = []
        decisions = [each for each in _list_decisions(var, damaged) if each.target in known]
        answers = AnswerFile(var).read()
        calling = {each.target for each in decisions if _calls_for_something(each, answers)}
        targets = {
            each.target: self._read_target(each.target, deployment, busy.get(each.target))
            if each.target in calling
            else TargetState(DecisionSpec())
            for each in decisions
        }
        return FleetState(
            decisions=decisions,
            targets=targets,
            ledger=Ledger({key: entry for key, entry in ledger.entries.items() if key not in without}),
            budget=deployment.budget,
            answers=answers,
            outdated={
                (each.target, each.strategy): f"its entry does not use the strategy {each.strategy} any more"
                for each in decisions
                if each.target in calling
                and targets[each.target].problem is None
                and each.strategy not in targets[each.target].ranks
            },
            damaged=damaged,
        )

    def find_outdated(self, decisions: Collection[Decision]) -> dict[tuple[str, str], Outdated]:
        """Return the decisions that are about another draft than the one in service, or older than the newest report."""
        artifacts = ArtifactStore(self.registry.resolve_var_folder())
        found = {}
        for each in decisions:
            try:
                outdated = _compare(each, artifacts)
            except DraftworksError as error:
                outdated = Outdated(str(error).splitlines()[0], "unknown", blocks=True)
            if outdated is not None:
                found[each.target, each.strategy] = outdated
        return found

    def plan(
        self, state: FleetState, now: float, outdated: Mapping[tuple[str, str], Outdated] | None = None
    ) -> list[Step]:
        """Return the steps that start now, see `plan_actions`; none for weights that were replaced since the
        decision, and none of `outdated`, as `find_outdated` returns them, that block."""
        blocking = {key: found.reason for key, found in (outdated or {}).items() if found.blocks}
        state = replace(state, outdated={**blocking, **state.outdated})
        digests = self.digests or FileDigests(self.registry.resolve_var_folder() / "digests.json")
        decisions = {(each.target, each.strategy): each for each in state.decisions}
        looked_at: set[tuple[str, str]] = set()
        while True:
            steps = plan_actions(state, now)
            new = [(step.target, step.strategy) for step in steps if step.action is Action.START]
            new = [each for each in new if each not in looked_at]
            changed = {each: why for each in new if (why := self._explain_weights(decisions[each], digests))}
            looked_at.update(new)
            if not changed:
                return steps
            state = replace(state, outdated={**state.outdated, **changed})

    def _explain_weights(self, decision: Decision, digests: FileDigests) -> str | None:
        try:
            now = resolve_target(self.registry.load_target(decision.target), self.registry, digests).digest
        except DraftworksError as error:
            return str(error).splitlines()[0]
        if now == decision.target_digest:
            return None
        return "decided for other weights than the target has now: draftworks run evaluate"

    def _read_target(self, name: str, deployment: DeploymentSpec, busy: str | None) -> TargetState:
        try:
            target = self.registry.load_target(name)
            nodes = merge_launcher(deployment.launcher, target.launcher, "train", f"target {name}: launcher").nodes
        except DraftworksError as error:
            return TargetState(DecisionSpec(), busy=busy, problem=str(error).splitlines()[0])
        if target.decision is None:
            return TargetState(DecisionSpec(), busy=busy, problem="its entry has no section decision any more")
        ranks = {strategy: entry.training.processes * nodes for strategy, entry in target.strategies.items()}
        return TargetState(target.decision, ranks, busy)


def _list_decisions(var: Path, damaged: list[str]) -> Iterator[Decision]:
    """Yield the newest decision of every target and strategy; adds to `damaged` why one cannot be read."""
    for path in sorted((var / FOLDER).glob(f"*/*/{RECORD}")):
        try:
            found = find_decision(var, path.parent.parent.name, path.parent.name)
        except (StoreError, ValueError) as error:
            damaged.append(str(error))
            continue
        if found is not None:
            yield found


def _calls_for_something(decision: Decision, answers: Answers) -> bool:
    answer = answers.find(decision)
    return (decision.choice if answer is None else answer.choice) is not Choice.KEEP


def _compare(decision: Decision, artifacts: ArtifactStore) -> Outdated | None:
    register = ServiceRegister(artifacts.root, decision.target, decision.strategy)
    served = register.find()
    report = artifacts.find(of_strategy(decision.strategy).report, decision.target)
    facts = f"{'none' if served is None else served.draft.digest}:{'none' if report is None else report.path.name}"
    if served is None or served.draft.digest != decision.draft:
        found = "none" if served is None else served.draft.digest
        return Outdated(f"decided about draft {decision.draft}, in service is {found}: decided again", facts, True)
    if report is not None and report.created > datetime.fromisoformat(decision.when).timestamp():
        return Outdated("there is a newer report", facts, False)
    return None
