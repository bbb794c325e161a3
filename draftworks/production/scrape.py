"""One reading of a server's counters of speculative decoding: its pages, and the counts that every kind of server
has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftworks.errors import EngineError
from draftworks.sglang.counters import ACCEPTED, PASSES, REQUESTS, TOKENS, Metrics, ServerCounters, parse_metrics
from draftworks.storage.files import parse_json
from draftworks.storage.http_call import HttpClient
from draftworks.storage.words import list_names

POSITION = "position_"


@dataclass(frozen=True)
class Scrape:
    """The answer of one server.

    Attributes:
        version: of the server's software; None if it does not say.
        instance: changes with the server's process; None if nothing of it does.
        started: when the process started, in seconds since the epoch; None if it does not say.
        draft: the draft's path as the server was given it; None if the server does not say.
        counters: since the start of the process. `passes` with `accepted` and `proposed`, or with `tokens` and `requests`.
            Empty where the server only has a gauge.
        gauge: tokens per pass lately, the target's own included, by a gauge; None if there is none, or no pass.
        remarks: what a reader of the figures has to know.
    """

    version: str | None
    instance: str | None
    started: float | None
    draft: str | None
    counters: Mapping[str, int]
    gauge: float | None = None
    remarks: tuple[str, ...] = field(default=())


def count_accepted(counts: Mapping[str, int]) -> int:
    """Return the accepted tokens in a difference of counters.

    A server that counts tokens and not accepted ones gave of each request one token in the prefill, and of each pass one of
    the target's own. An answer that ends with an accepted token therefore counts one too few.
    """
    if ACCEPTED in counts:
        return counts[ACCEPTED]
    return max(counts[TOKENS] - counts[REQUESTS] - counts[PASSES], 0)


def list_positions(counts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return draft positions with their accepted tokens, in order; empty where the server does not count them."""
    found = [(int(name.removeprefix(POSITION)), n) for name, n in counts.items() if name.startswith(POSITION)]
    return sorted(found)


def require_model(found: Sequence[str | None], expected: Collection[str]) -> None:
    """Raise EngineError unless one of the names that a server gives its model is an expected one."""
    names = [name.rstrip("/") for name in found if name]
    if not names:
        raise EngineError("the server does not say which model it serves")
    if not {name.rstrip("/") for name in expected} & set(names):
        raise EngineError(
            f"serves another model: expected {' or '.join(sorted(expected))}, found {', '.join(dict.fromkeys(names))}. "
            "Nothing is recorded. If it is the target under another name, give that name as `model` of the server"
        )


MAX_METRICS_BYTES = 8 << 20
MAX_JSON_BYTES = 2 << 20
OK, NOT_FOUND = 200, 404


@dataclass(frozen=True)
class Address:
    """Where a server is, and how it is asked.

    Attributes:
        key: sent as a bearer token; never in a message.
    """

    url: str
    timeout_s: float
    key: str | None = None

    def fetch_text(self, path: str, max_bytes: int = MAX_METRICS_BYTES) -> str | None:
        """Return the body of a page as text; None if the server has no such page.

        Raises:
            EngineError: no answer, none within the time limit, a status other than 200, more than `max_bytes`, or not
                UTF-8.
        """
        headers = {"Accept": "text/plain, application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        hidden = {} if self.key is None else {self.key: "***"}
        with HttpClient(self.url, self.timeout_s, headers, hidden=hidden) as http:
            answer = http.call("GET", path, max_bytes=max_bytes)
        if answer.status == NOT_FOUND:
            return None
        if answer.status != OK:
            raise EngineError(f"{path}: status {answer.status}: {' '.join(answer.quoted.split())}")
        try:
            return answer.content.decode()
        except UnicodeDecodeError:
            raise EngineError(f"{path}: expected text, found {answer.content[:20]!r}") from None

    def fetch_metrics(self, names: ServerCounters, hint: str) -> Metrics:
        """Return the metrics of the one model that a server serves.

        Raises EngineError as `fetch_text`, and with `hint` without that page.
        """
        text = self.fetch_text("/metrics")
        if text is None:
            raise EngineError(f"has no /metrics: {hint}")
        metrics = parse_metrics(text, names.wanted, names.prefix)
        labels = metrics.list_models()
        if len(labels) > 1:
            raise EngineError(
                f"has counters of several models ({list_names(labels)}): is it a router? Give the address of one server"
            )
        return metrics

    def fetch_object(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object of a page; None if there is no such page. Raises EngineError as `fetch_text`."""
        text = self.fetch_text(path, MAX_JSON_BYTES)
        if text is None:
            return None
        try:
            found = parse_json(text)
        except ValueError as error:
            raise EngineError(f"{path}: expected JSON: {error}") from None
        if not isinstance(found, dict):
            raise EngineError(f"{path}: expected a JSON object, found {type(found).__name__}")
        return found
