"""Reads the servers of a target at the same time, each into its own series.

A server that fails does not stop the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from draftworks.config.observation import ObservedServerSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError, DraftworksError, EngineError, StoreError
from draftworks.production.readings import Reading, is_restart, thin
from draftworks.production.scrape import Address, Scrape, scrape_sglang, scrape_vllm
from draftworks.service.register import InService, ServedDraft, ServiceRegister
from draftworks.storage.event_log import EventLog
from draftworks.storage.files import parse_json
from draftworks.storage.names import require_name

FOLDER, SERIES, LOCK = "observed", "series.jsonl", ".lock"
SCHEMA_VERSION = 1
MAX_READINGS = 10_000
MAX_BYTES = 64 << 20
CLOCK_TOLERANCE_S = 300.0


@dataclass(frozen=True)
class ServerSeries:
    """The readings of one server, oldest first.

    Attributes:
        var: folder of all results.
        most: readings from which on the series is thinned.
    """

    var: Path
    target: str
    server: str
    most: int = MAX_READINGS

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.target) / require_name(self.server)

    @property
    def file(self) -> Path:
        return self.folder / SERIES

    def read(self) -> list[Reading]:
        """Return all readings; none if the server was never read.

        Raises:
            StoreError: the file is damaged, or of another server.
        """
        return self._log.read()

    def append(self, take: Callable[[list[Reading]], Reading]) -> list[Reading]:
        """Add a reading to the series, and return all readings.

        Args:
            take: reads the server, while no other observer does, and returns the reading. It is given those before it. An
                error of it leaves the series as it is.

        Raises:
            StoreError: the clock of this machine is far behind that of the last reading, or the file is damaged.
        """
        readings: list[Reading] = []

        def make(before: list[Reading]) -> list[Reading]:
            taken = take(before)
            if before and taken.time < before[-1].time - CLOCK_TOLERANCE_S:
                raise StoreError(
                    f"server {self.server}: the clock of this machine is {before[-1].time - taken.time:,.0f} s behind the "
                    "last reading. Nothing is recorded"
                )
            return [taken]

        def shorten(every: list[Reading]) -> list[Reading]:
            readings[:] = every if len(every) <= self.most else thin(every, self.most - self.most // 4)
            return readings

        busy = f"another process reads the server {self.server} of {self.target}: waiting"
        self._log.append(make, busy, shorten)
        return readings

    @property
    def _log(self) -> EventLog[Reading]:
        header = {"schema": SCHEMA_VERSION, "target": self.target, "server": self.server}
        return EventLog(
            self.file,
            lambda line: Reading.from_json(parse_json(line)),
            lambda reading: json.dumps(reading.to_json(), separators=(",", ":"), allow_nan=False).encode(),
            "the series of a server",
            remedy="Move the file away to begin a new series",
            header=header,
            lock=self.folder / LOCK,
            max_bytes=MAX_BYTES,
        )


AT_ONCE = 16
UNKNOWN_DRAFT = "not known"
MAX_DRAFT_NAME = 300
ADAPTERS: Mapping[str, Callable[[Address, Collection[str]], Scrape]] = {"sglang": scrape_sglang, "vllm": scrape_vllm}


@dataclass(frozen=True)
class Observation:
    """The outcome of reading one server.

    Attributes:
        readings: its series, the new reading last; the series as it was if reading it failed.
        problem: why there is no new reading.
        remarks: of the new reading.
    """

    server: ObservedServerSpec
    readings: tuple[Reading, ...]
    problem: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observer:
    """The servers of one target.

    Attributes:
        var: folder of all results.
        models: names and paths by which a server may call the target.
        environment: has the keys of the servers.
    """

    var: Path
    target: TargetSpec
    models: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Callable[[], float] = time.time

    @classmethod
    def of(cls, target: TargetSpec, root: Path, var: Path) -> Observer:
        """Return the observer of a target of the registry in `root`.

        Raises:
            ConfigError: the target has no servers.
        """
        if not target.servers:
            raise ConfigError(f"target {target.name} has no servers: add a `servers` section to its entry")
        path = [] if target.is_hub else [str((root / target.model).resolve())]
        return cls(var, target, (target.model, *path))

    def observe(self, strategy: str | None = None) -> list[Observation]:
        """Read all servers, or those of one strategy, and return the outcomes in the entry's order."""
        servers = self.list_servers(strategy)
        with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(servers)) or 1) as pool:
            return list(pool.map(self._observe_server, servers))

    def recall(self, strategy: str | None = None) -> list[Observation]:
        """Return the series of the servers as they are, without a request to any of them."""
        return [Observation(server, tuple(self._open(server).read())) for server in self.list_servers(strategy)]

    def list_servers(self, strategy: str | None = None) -> list[ObservedServerSpec]:
        return [server for server in self.target.servers if strategy in (None, server.strategy)]

    def _open(self, server: ObservedServerSpec) -> ServerSeries:
        return ServerSeries(self.var, self.target.name, server.name)

    def _observe_server(self, server: ObservedServerSpec) -> Observation:
        remarks: list[str] = []

        def take(before: list[Reading]) -> Reading:
            address = Address(server.url, server.timeout_s, read_key(server, self.environment))
            scraped = ADAPTERS[server.kind](address, (server.model,) if server.model else self.models)
            if not scraped.counters and scraped.gauge is None:
                raise EngineError("has no counters of speculative decoding, and no pass lately by its gauge")
            history = ServiceRegister(self.var, self.target.name, server.strategy).read_history()
            remarks.extend(scraped.remarks)
            return make_reading(scraped, before, history, self.clock())

        series = self._open(server)
        try:
            return Observation(server, tuple(series.append(take)), remarks=tuple(remarks))
        except (DraftworksError, OSError) as error:
            problem = f"server {server.name} ({server.url}): {error}"
        try:
            return Observation(server, tuple(series.read()), problem)
        except DraftworksError:
            return Observation(server, (), problem)  # the problem says it already


def make_reading(scraped: Scrape, before: Sequence[Reading], history: Sequence[InService], now: float) -> Reading:
    """Return the reading of a scrape: it says which draft the server serves, and is not earlier than the one before.

    A server that does not say its draft loaded the one that was in service when its process started; it goes on with that
    until it is started again.

    Raises:
        EngineError: the scrape is of a process that was read before another one, so that the address leads to several.
    """
    last = before[-1] if before else None
    restarted = last is not None and is_restart(last, scraped.instance, scraped.counters)
    if restarted and scraped.instance is not None:
        known = next((one for one in before if one.instance == scraped.instance), None)
        if known is not None and last is not None and last.instance != scraped.instance:
            raise EngineError(
                "several servers answer at this address: their counters cannot be told apart. Give the address of each "
                "server behind the load balancer. Nothing is recorded"
            )
    if scraped.draft is not None:
        draft = identify_draft(scraped.draft, history)
    elif last is not None and not restarted and last.draft != UNKNOWN_DRAFT:
        draft = last.draft
    else:
        draft = find_served_at(history, now if scraped.started is None else scraped.started)
    return Reading(
        time=now if last is None or now < last.time - CLOCK_TOLERANCE_S else max(now, last.time),
        instance=scraped.instance,
        draft=draft,
        by_server=scraped.draft is not None,
        version=scraped.version,
        counters=scraped.counters,
        gauge=scraped.gauge,
    )


def identify_draft(path: str, history: Sequence[InService]) -> str:
    """Return the digest of the draft that was exported to a path; the path if it was never in service here.

    Servers may see the folder of results under another name, so the path's end is compared.
    """
    parts = path.rstrip("/")
    for draft in _list_drafts(history):
        if any(parts.endswith(f"/{draft.path}/{name}") or parts == f"{draft.path}/{name}" for name in draft.formats):
            return draft.digest
    return path[-MAX_DRAFT_NAME:]


def find_served_at(history: Sequence[InService], moment: float) -> str:
    """Return the digest of the draft that was in service at a time, in seconds since the epoch."""
    since = [record for record in history if datetime.fromisoformat(record.when).timestamp() <= moment]
    return since[-1].draft.digest if since else UNKNOWN_DRAFT


def _list_drafts(history: Sequence[InService]) -> list[ServedDraft]:
    canaries = [record.canary.draft for record in history if record.canary is not None]
    return [*(record.draft for record in reversed(history)), *reversed(canaries)]


def read_key(server: ObservedServerSpec, environment: Mapping[str, str]) -> str | None:
    """Return the key of a server. Raises ConfigError if the environment lacks it."""
    if server.api_key_env is None:
        return None
    key = environment.get(server.api_key_env, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"api_key_env: the environment has no key in {server.api_key_env}: set it where this runs")
    return key
