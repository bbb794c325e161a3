"""The logs of a target's requests, with the drafts that answered them and what their reports promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config.observation import RequestsSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError, DraftworksError
from draftworks.production.observer import find_served_at, identify_draft
from draftworks.service.register import InService, ServiceRegister
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.names import of_strategy
from draftworks.storage.records import ReportIdentity

if TYPE_CHECKING:  # they import numpy
    from draftworks.production.promised import Promise
    from draftworks.production.request_log import LogReading, ServedBy
    from draftworks.production.requests import ServedRequest
    from draftworks.production.served_slices import ServedStanding


@dataclass(frozen=True)
class ServedLogs:
    """The logs of a target as they are now, and the standing of each strategy whose drafts answered.

    Attributes:
        assumed: number of requests whose draft is taken to be the one that was in service at their time.
    """

    reading: LogReading
    standings: tuple[ServedStanding, ...]
    assumed: int = 0


@dataclass
class DraftFinder:
    """Finds the draft that answered a request: as its server says, or else the one that was in service at that time.

    Attributes:
        strategies: by name of the server; `default` is that of other servers.
        assumed: requests whose server did not say it.
    """

    var: Path
    target: str
    strategies: Mapping[str, str]
    default: str | None
    assumed: int = 0
    _histories: dict[str, Sequence[InService]] = field(default_factory=dict)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def find(self, request: ServedRequest) -> ServedBy | None:
        """Return what answered a request; None if the server's strategy is not known."""
        from draftworks.production.request_log import ServedBy

        strategy = self.strategies.get(request.server, self.default)
        if strategy is None:
            return None
        if strategy not in self._histories:
            self._histories[strategy] = ServiceRegister(self.var, self.target, strategy).read_history()
        history = self._histories[strategy]
        if request.draft is None:
            self.assumed += 1
            return ServedBy(strategy, find_served_at(history, request.time))
        said = (strategy, request.draft)
        if said not in self._known:
            digests = {record.draft.digest for record in history}
            known = request.draft in digests
            self._known[said] = request.draft if known else identify_draft(request.draft, history)
        return ServedBy(strategy, self._known[said])


def find_requests_spec(target: TargetSpec) -> RequestsSpec:
    """Return how the logs of a target are read. Raises ConfigError if its entry does not name any."""
    if target.observation.requests is None:
        raise ConfigError(
            f"target {target.name} has no logs of requests: add `requests: {{files: [...]}}` to its section `observation`"
        )
    return target.observation.requests


def read_logs(target: TargetSpec, root: Path, var: Path, clock: Callable[[], float] = time.time) -> ServedLogs:
    """Read the logs of a target without assessing what they say.

    Args:
        root: the registry's folder.
        var: folder of all results.

    Raises:
        ConfigError: the entry names no logs.
        DataError: a log cannot be read.
        StoreError: a record of what was in service is damaged.
    """
    from draftworks.production.request_log import RequestLog

    spec = find_requests_spec(target)
    names = list(target.strategies)
    default = spec.strategy or (names[0] if len(names) == 1 else None)
    finder = DraftFinder(var, target.name, {one.name: one.strategy for one in target.servers}, default)
    reading = RequestLog(spec, root, list_models(target, spec, root), finder.find, clock).read()
    return ServedLogs(reading, (), finder.assumed)


def read_served_logs(
    target: TargetSpec,
    root: Path,
    artifacts: ArtifactStore,
    strategy: str | None = None,
    clock: Callable[[], float] = time.time,
) -> ServedLogs:
    """Read the logs of a target, and assess the drafts of all strategies, or of one. Raises as `read_logs`."""
    from draftworks.production.served_slices import assess_requests, find_newest_draft

    logs, eval_set = read_logs(target, root, artifacts.root, clock), find_requests_spec(target).eval_set
    standings = []
    for name, table in logs.reading.requests.items():
        if strategy in (None, name):
            promise = _find_promise(artifacts, target.name, name, find_newest_draft(table), eval_set)
            problem, promised = (promise, None) if isinstance(promise, str) else ("", promise)
            found = assess_requests(name, table, target.observation, promised)
            standings.append(replace(found, problem=problem))
    return replace(logs, standings=tuple(standings))


def list_models(target: TargetSpec, spec: RequestsSpec, root: Path) -> list[str]:
    """Return the names and paths by which an answer may call the target."""
    path = [] if target.is_hub else [str((root / target.model).resolve())]
    named = [spec.model, *(server.model for server in target.servers)]
    return [name.rstrip("/") for name in (target.model, *path, *named) if name is not None]


def _find_promise(artifacts: ArtifactStore, target: str, strategy: str, draft: str, eval_set: str) -> Promise | str:
    """Return what the newest report of a draft promised, or why that is not known."""
    from draftworks.production.promised import Promise

    try:
        reports = artifacts.list_all(of_strategy(strategy).report, target)
        report = next((each for each in reports if ReportIdentity.of(each).draft_identity == draft), None)
        if report is None:
            return f"draft {draft} has no report here: draftworks run evaluate --target {target}"
        return Promise.read(artifacts, report, eval_set)
    except DraftworksError as error:
        return f"what was promised is not known: {error}"
