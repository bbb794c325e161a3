"""The fleet at a glance: of every draft what it promised, what it does in service, and what a person should do. Torch-free.

It reads records only. Weights are looked at by their size and time; a file that would have to be read for its digest is "not
looked at". No server is asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.decision.fleet_state import FleetReader
from draftworks.decision.queue import Action, Step
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.acceptance_length import SYMBOL, count_own_token, format_change, format_length
from draftworks.evaluation.report.summary import RungScore
from draftworks.fleet.leaderboard import Fleet, ReportScore, Standing, read_measured
from draftworks.production.observer import Observer
from draftworks.production.readings import WindowAcceptance, WindowDifference
from draftworks.production.standing import ServerStanding, assess_all
from draftworks.service.register import InService, ServiceRegister
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import DigestNotCached, RememberedDigests
from draftworks.storage.names import of_strategy
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry

OTHER_WEIGHTS = "weights of the target"
"""Begin of a change, as `draftworks.fleet.staleness` says it."""
MOST_ADVICE = 20
SERVED = "rung6_served_acc_len"
"""Of servers' own counters; no report has it."""


class Need(IntEnum):
    """Why a draft needs a person, the most urgent first."""

    BROKEN = 0
    OTHER_WEIGHTS = 1
    SERVES_LESS = 2
    ANSWER = 3
    BETTER = 4
    STALE = 5
    NOTHING_MADE = 6
    NOT_MEASURED = 7
    UNSURE = 8
    NOT_SERVED = 9
    NOT_OBSERVED = 10
    NONE = 11


WORDS = {
    Need.BROKEN: "repair",
    Need.OTHER_WEIGHTS: "new weights",
    Need.SERVES_LESS: "serves less",
    Need.ANSWER: "your answer",
    Need.BETTER: "promotion",
    Need.STALE: "stale",
    Need.NOTHING_MADE: "first run",
    Need.NOT_MEASURED: "a report",
    Need.UNSURE: "unsure",
    Need.NOT_SERVED: "service",
    Need.NOT_OBSERVED: "observation",
    Need.NONE: "nothing",
}


@dataclass(frozen=True)
class Accepted:
    """Accepted tokens per pass, with the bounds of an interval where there is one; `metric` says of what."""

    metric: str
    value: float
    low: float | None
    high: float | None

    @classmethod
    def of_score(cls, score: RungScore) -> Accepted | None:
        return None if score.value is None else cls(score.metric, score.value, score.low, score.high)

    @classmethod
    def of_windows(cls, found: WindowAcceptance) -> Accepted | None:
        bounds = (None, None) if found.interval is None else (found.interval.low, found.interval.high)
        return None if found.value is None else cls(SERVED, found.value, *bounds)

    def describe(self) -> str:
        if self.low is None or self.high is None:
            return format_length(self.value)
        return f"{format_length(self.value)} ±{max(self.high - self.value, self.value - self.low):.2f}"

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON, the target's own token counted, as servers print them."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        counted = {name: None if number is None else count_own_token(number) for name, number in numbers.items()}
        return {"metric": self.metric, **counted}


@dataclass(frozen=True)
class DraftStatus:
    """A strategy of a target, or a target whose entry cannot be read (strategy empty).

    Attributes:
        promised: walk (rung 3) of the draft in service, or of the newest one where none is.
        served: what its servers accept over their newest windows, of the server that accepts least; None if nothing was
            read.
        draft: digest of the draft in service; None if none is.
        since: when it was put into service, ISO 8601 in UTC.
        newer: accepted tokens per pass of the newest draft minus those promised, where that is another draft.
        stale_for: in words, what has changed since the newest draft was trained, or else since it was measured.
        next: what happens by itself, in words; empty if nothing does.
        need, why: why a person is needed.
        command: what a person should run; empty if nothing.
    """

    target: str
    strategy: str
    promised: Accepted | None = None
    served: Accepted | None = None
    draft: str | None = None
    since: str | None = None
    newer: float | None = None
    stale_for: tuple[str, ...] = ()
    next: str = ""
    need: Need = Need.NONE
    why: str = ""
    command: str = ""

    @property
    def name(self) -> str:
        return f"{self.target}/{self.strategy}".rstrip("/")

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON; acceptance lengths count the target's own token, as servers print them."""
        return {
            **asdict(self),
            "promised": None if self.promised is None else self.promised.to_json(),
            "served": None if self.served is None else self.served.to_json(),
            "stale_for": list(self.stale_for),
            "need": self.need.name.lower(),
        }


class _LookedAtDigests(RememberedDigests):
    """Digests of files that have not changed since they were read."""

    def of_file(self, path: Path) -> str:
        try:
            return super().of_file(path)
        except DigestNotCached as error:
            raise StoreError(f"{path} has changed, or was never read: not looked at") from error


def read_status(registry: Registry, targets: Iterable[str] | None, now: float) -> list[DraftStatus]:
    """Return the status of every draft of these targets, or of all; what needs a person first.

    Args:
        now: seconds since the epoch.

    Raises:
        ConfigError: one of the targets is not in the registry, or `deployment.yaml` cannot be read.
    """
    var = registry.resolve_var_folder()
    fleet = Fleet(registry, ArtifactStore(var), _LookedAtDigests(var / "digests.json")).read_once()
    wanted = None if targets is None else {registry.find_target_file(name).stem for name in targets}
    steps = _plan_steps(fleet, now)
    found = [
        _assess(fleet, standing, steps.get((standing.target, standing.strategy)))
        for standing in fleet.standings(wanted)
    ]
    return sorted(found, key=lambda one: (one.need, one.target, one.strategy))


def _plan_steps(fleet: Fleet, now: float) -> Mapping[tuple[str, str], Step]:
    """Return what follows from each decision; nothing where decisions cannot be read, which `draftworks decisions` tells."""
    reader = FleetReader(fleet.registry, fleet.digests)
    try:
        state = reader.read(busy={})
        steps = reader.plan(state, now, reader.find_outdated(state.decisions))
    except DraftworksError:
        return {}
    return {(step.target, step.strategy): step for step in steps}


def _assess(fleet: Fleet, standing: Standing, step: Step | None) -> DraftStatus:
    name, strategy = standing.target, standing.strategy
    if not strategy:
        why = standing.problem or ""
        return DraftStatus(
            name, "", need=Need.BROKEN, why=why, command=f"draftworks check --target {shlex.quote(name)}"
        )
    try:
        record = ServiceRegister(fleet.artifacts.root, name, strategy).find()
        promised = standing.latest if record is None else _find_promise(fleet, standing, record)
        servers = _recall_servers(fleet, fleet.registry.load_target(name), strategy)
    except DraftworksError as error:
        return DraftStatus(name, strategy, need=Need.BROKEN, why=str(error), command="draftworks doctor")
    found = DraftStatus(
        name,
        strategy,
        promised=None if promised is None else Accepted.of_score(promised.score),
        served=_find_least(servers),
        draft=None if record is None else record.draft.digest,
        since=None if record is None else record.when,
        newer=_compare(standing.latest, promised),
        stale_for=_drop_unknown(standing.draft_changes) or standing.stale_against,
        next="" if step is None or step.action is Action.KEEP else f"{step.choice}: {step.action}, {step.reason}",
    )
    need, why, command = _find_need(found, standing, step, servers)
    return replace(found, need=need, why=why, command=command)


def _find_need(
    found: DraftStatus, standing: Standing, step: Step | None, servers: Iterable[ServerStanding]
) -> tuple[Need, str, str]:
    """Return the most urgent need of a draft, why, and the command for it."""
    target, names = shlex.quote(found.target), f"{shlex.quote(found.target)} {found.strategy}"
    lost = [one for one in servers if _is_less(one.difference)]
    if found.draft is not None and any(change.startswith(OTHER_WEIGHTS) for change in found.stale_for):
        return Need.OTHER_WEIGHTS, "the target's weights changed", f"draftworks run everything --target {target}"
    if lost:
        change = format_change(lost[0].difference.value) if lost[0].difference else ""
        return (
            Need.SERVES_LESS,
            f"{lost[0].server} accepts {change} than in its first hours",
            f"draftworks slices {names}",
        )
    if step is not None and step.action is Action.ASK:
        return Need.ANSWER, f"{step.choice} waits for an answer", f"draftworks accept {names}"
    if found.newer is not None and found.newer > 0:
        return Need.BETTER, f"a newer draft has {format_change(found.newer)}", f"draftworks promote {names}"
    if standing.latest is None:
        made = "no report" in (standing.problem or "")
        job = "evaluate" if made else "everything"
        need = Need.NOT_MEASURED if made else Need.NOTHING_MADE
        return need, (standing.problem or "").partition(":")[0], f"draftworks run {job} --target {target}"
    if found.stale_for:
        job = "everything" if _drop_unknown(standing.draft_changes) else "evaluate"
        return Need.STALE, f"stale: {', '.join(found.stale_for)}", f"draftworks run {job} --target {target}"
    if standing.problem:
        return Need.UNSURE, standing.problem, "draftworks leaderboard"
    if found.draft is None:
        return Need.NOT_SERVED, "no draft is in service", f"draftworks promote {names}"
    if found.served is None:
        return Need.NOT_OBSERVED, "no server was read", f"draftworks observe {target}"
    return Need.NONE, "", ""


def _drop_unknown(changes: Iterable[str]) -> tuple[str, ...]:
    """Return the changes without what an early record does not say."""
    return tuple(change for change in changes if ": not known" not in change)


def _find_promise(fleet: Fleet, standing: Standing, record: InService) -> ReportScore | None:
    """Return the figure of the report by which the draft in service was judged; None if that report is gone."""
    if standing.latest is not None and standing.latest.draft == record.draft.digest:
        return standing.latest
    asset = of_strategy(standing.strategy).report
    reports = fleet.artifacts.list_all(asset, standing.target)
    found = next((each for each in reports if each.path.name == record.draft.report), None)
    return None if found is None else read_measured(found)


def _recall_servers(fleet: Fleet, target: TargetSpec, strategy: str) -> list[ServerStanding]:
    if not any(server.strategy == strategy for server in target.servers):
        return []
    observations = Observer.of(target, fleet.registry.root, fleet.artifacts.root).recall(strategy)
    return assess_all(observations, target.observation, fleet.artifacts, target.name)


def _find_least(servers: Iterable[ServerStanding]) -> Accepted | None:
    read = [Accepted.of_windows(one.now) for one in servers if one.now is not None]
    return min((one for one in read if one is not None), key=lambda one: one.value, default=None)


def _compare(latest: ReportScore | None, promised: ReportScore | None) -> float | None:
    """Return the newest draft's acceptance minus the promised one; None for the same draft, or metrics that do not compare."""
    if latest is None or promised is None or latest.draft == promised.draft:
        return None
    if latest.score.metric != promised.score.metric or latest.score.value is None or promised.score.value is None:
        return None
    return latest.score.value - promised.score.value


def _is_less(difference: WindowDifference | None) -> bool:
    return difference is not None and difference.interval is not None and difference.interval.high < 0


def describe_row(status: DraftStatus) -> dict[str, str]:
    """Return the texts of one row of the table."""
    return {
        "draft": status.name,
        f"{SYMBOL} promised": "–" if status.promised is None else status.promised.describe(),
        f"{SYMBOL} served": "–" if status.served is None else status.served.describe(),
        "since": "–" if status.since is None else f"{datetime.fromisoformat(status.since):%Y-%m-%d}",
        "needs": WORDS[status.need],
    }


def list_advice(found: Sequence[DraftStatus], most: int = MOST_ADVICE) -> Iterator[str]:
    """Yield why the first `most` drafts need a person, each with its command, and what happens by itself."""
    needy = [one for one in found if one.command]
    for one in needy[:most]:
        yield f"{one.name}: {' '.join(one.why.split())}"
        if one.next:
            yield f"    by itself: {one.next}"
        yield f"    {one.command}"
    if len(needy) > most:
        yield f"and {format_count(len(needy) - most, 'draft')} more: --json, or draftworks status TARGET"
