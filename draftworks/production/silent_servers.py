"""Servers that accept about nothing, or far less than the walk: each is asked how it drafts, and likely causes are named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError, EngineError
from draftworks.evaluation.acceptance_length import SYMBOL, format_length
from draftworks.production.observer import read_key
from draftworks.production.scrape import Address
from draftworks.production.serving_facts import ServingFacts, read_pages
from draftworks.production.silent_failures import (
    DraftOnDisk,
    Evidence,
    LikelyCause,
    describe,
    find_causes,
    is_silent,
)
from draftworks.production.standing import ServerStanding
from draftworks.service.register import ServiceRegister


@dataclass(frozen=True)
class SilentServer:
    """A server whose draft is of little use, with the likely causes, the surest first."""

    server: str
    said: str
    causes: tuple[LikelyCause, ...]

    def list_lines(self) -> list[str]:
        return [f"{self.server}: {self.said}. Likely cause: {each}" for each in self.causes]

    def to_json(self) -> dict[str, Any]:
        return {"server": self.server, "said": self.said, "causes": [asdict(each) for each in self.causes]}


def explain_standing(
    standing: ServerStanding, var: Path, target: str, environment: Mapping[str, str] = os.environ
) -> SilentServer | None:
    """Return why a server accepts so little; None if it does not, or has had too little traffic to say so."""
    now = standing.now
    promised = None if standing.walk is None else standing.walk.value
    if now is None or now.value is None or not is_silent(now.value, now.passes, promised):
        return None
    server = standing.observation.server
    try:
        facts = _ask(Address(server.url, server.timeout_s, read_key(server, environment)))
        record = ServiceRegister(var, target, server.strategy).find()
        draft = None if record is None else DraftOnDisk.read(var, record.draft)
    except (DraftworksError, OSError) as error:
        unread = LikelyCause("not known", str(error), "Ask again when it can be read")
        return SilentServer(
            standing.server, f"{SYMBOL} {format_length(now.value)} over {now.passes:,} passes", (unread,)
        )
    evidence = Evidence.gather(now.value, now.passes, promised, facts, draft)
    return SilentServer(standing.server, describe(evidence), tuple(find_causes(evidence)))


def _ask(address: Address) -> ServingFacts:
    """Ask a server what it is; a page that it refuses is one that it does not have."""

    def fetch(path: str) -> Mapping[str, Any] | None:
        try:
            return address.fetch_object(path)
        except EngineError:
            return None

    return ServingFacts.of(read_pages(fetch))
