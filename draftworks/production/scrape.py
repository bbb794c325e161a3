"""One reading of a server's counters of speculative decoding: its pages, and what SGLang and vLLM say there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftworks.errors import EngineError
from draftworks.servers.counters import (
    ACCEPTED,
    BY_POSITION,
    CREATED,
    LENGTH,
    PASSES,
    PROCESS_START,
    PROPOSED,
    REQUESTS,
    SGLANG_COUNTERS,
    TOKENS,
    VLLM_COUNTERS,
    Metrics,
    ServerCounters,
    parse_metrics,
)
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


def scrape_sglang(address: Address, expected_models: Collection[str]) -> Scrape:
    """Read an SGLang server.

    Raises:
        EngineError: it cannot be reached, has no metrics, serves another model, does not speculate, or its answers are not
            what SGLang sends.
    """
    info = address.fetch_object("/server_info") or {}
    metrics = address.fetch_metrics(SGLANG_COUNTERS, "start SGLang with --enable-metrics")
    if not metrics.prefixed and not info:
        raise EngineError(f"has neither /server_info nor a metric {SGLANG_COUNTERS.prefix}…: is it SGLang?")
    names = [_read_text(info, "model_path"), _read_text(info, "served_model_name"), *metrics.list_models()]
    require_model(names, expected_models)
    if info and not info.get("speculative_algorithm"):
        raise EngineError("runs without speculative decoding: /server_info has no speculative_algorithm")
    version = _read_text(info, "version")
    counters = _read_counters(metrics, version)
    seed = info.get("random_seed")  # drawn by each process where the user gives none
    return Scrape(
        version=version,
        instance=None if not isinstance(seed, int) else f"seed {seed}",
        started=None,
        draft=_name_draft(info),
        counters=counters,
        gauge=metrics.read_gauge(SGLANG_COUNTERS.others[LENGTH])
        or None,  # SGLang sets it to 0 where no pass ran lately
        remarks=_list_sglang_remarks(info, version, counters),
    )


def _read_counters(metrics: Metrics, version: str | None) -> dict[str, int]:
    """Return the counters; 0 for those that a version which is known to have them did not count yet; {} without them."""
    if version not in SGLANG_COUNTERS.versions and SGLANG_COUNTERS.counters[PASSES] not in metrics:
        return {}
    return {
        name: metrics.read_counter(each) if each in metrics else 0 for name, each in SGLANG_COUNTERS.counters.items()
    }


def _name_draft(info: Mapping[str, Any]) -> str | None:
    path = _read_text(info, "speculative_draft_model_path")
    algorithm = _read_text(info, "speculative_algorithm")
    return path or (None if algorithm is None else f"{algorithm} without a draft model")


def _list_sglang_remarks(info: Mapping[str, Any], version: str | None, counters: Mapping[str, int]) -> tuple[str, ...]:
    found = []
    if version not in SGLANG_COUNTERS.versions:
        said = f"SGLang {version}" if version else "a server that does not say its version"
        found.append(f"{said}: the names of the counters are known of {', '.join(SGLANG_COUNTERS.versions)} alone")
    if not info:
        found.append("no /server_info: the draft is taken to be the one in service")
    if not counters:
        found.append(f"no counters, only the gauge {SGLANG_COUNTERS.others[LENGTH]} of the last batches: no interval")
    return tuple(found)


def _read_text(info: Mapping[str, Any], name: str) -> str | None:
    value = info.get(name)
    return value if isinstance(value, str) and value else None


MAX_POSITIONS = 64


def scrape_vllm(address: Address, expected_models: Collection[str]) -> Scrape:
    """Read a vLLM server.

    Raises:
        EngineError: it cannot be reached, serves another model, does not speculate, or its answers are not what vLLM sends.
    """
    metrics = address.fetch_metrics(VLLM_COUNTERS, "is it vLLM, started without --disable-log-stats?")
    if not metrics.prefixed:
        raise EngineError(f"has no metric {VLLM_COUNTERS.prefix}…: is it vLLM?")
    missing = [name for name in VLLM_COUNTERS.counters.values() if name not in metrics]
    labels = metrics.list_models()
    require_model([*labels, *_list_roots(address, labels)], expected_models)
    if missing:
        raise EngineError(
            f"has no {missing[0]}: it runs without speculative decoding, or is a version with other names (those of "
            f"{', '.join(VLLM_COUNTERS.versions)} are known)"
        )
    counters = {name: metrics.read_counter(each) for name, each in VLLM_COUNTERS.counters.items()}
    if counters[ACCEPTED] > counters[PROPOSED]:
        raise EngineError(f"counts {counters[ACCEPTED]:,} accepted tokens of {counters[PROPOSED]:,} proposed ones")
    started = metrics.read_gauge(VLLM_COUNTERS.others[PROCESS_START]) or metrics.read_gauge(
        VLLM_COUNTERS.others[CREATED]
    )
    version = (address.fetch_object("/version") or {}).get("version")
    version = version if isinstance(version, str) and version else None
    return Scrape(
        version=version,
        instance=None if started is None else f"start {started:.3f}",
        started=started,
        draft=None,
        counters={**counters, **_read_positions(metrics)},
        remarks=_list_vllm_remarks(version),
    )


def _read_positions(metrics: Metrics) -> dict[str, int]:
    found = metrics.read_counter_by(VLLM_COUNTERS.others[BY_POSITION], "position")
    if len(found) > MAX_POSITIONS or not all(position.isascii() and position.isdecimal() for position in found):
        raise EngineError(
            f"{VLLM_COUNTERS.others[BY_POSITION]}: expected up to {MAX_POSITIONS} numbered positions, found {len(found)}"
        )
    return {f"{POSITION}{int(position)}": count for position, count in found.items()}


def _list_roots(address: Address, labels: Sequence[str]) -> list[str]:
    """Return the paths of the models that are served under one of these names, by /v1/models."""
    found: Any = (address.fetch_object("/v1/models") or {}).get("data")
    models = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    served = [one for one in models if not labels or one.get("id") in labels]
    names = [one.get(key) for one in served for key in ("id", "root")]
    return [name for name in names if isinstance(name, str)]


def _list_vllm_remarks(version: str | None) -> tuple[str, ...]:
    said = "the server does not say its draft: it is taken to be the one in service when the process started"
    if version is not None and any(version.startswith(f"{known}.") for known in VLLM_COUNTERS.versions):
        return (said,)
    found = f"vLLM {version}" if version else "a vLLM that does not say its version"
    return (
        said,
        f"{found}: the names of the counters are known of {', '.join(VLLM_COUNTERS.versions)}; this one has the same",
    )
