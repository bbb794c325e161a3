"""One reading of a vLLM server (V1 engine): /metrics, /version and /v1/models. vLLM does not say which draft it serves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from draftworks.errors import EngineError
from draftworks.production.scrape import POSITION, Address, Scrape, require_model
from draftworks.sglang.counters import ACCEPTED, BY_POSITION, CREATED, PROCESS_START, PROPOSED, VLLM, Metrics

MAX_POSITIONS = 64


def scrape_vllm(address: Address, expected_models: Collection[str]) -> Scrape:
    """Read a vLLM server.

    Raises:
        EngineError: it cannot be reached, serves another model, does not speculate, or its answers are not what vLLM sends.
    """
    metrics = address.fetch_metrics(VLLM, "is it vLLM, started without --disable-log-stats?")
    if not metrics.prefixed:
        raise EngineError(f"has no metric {VLLM.prefix}…: is it vLLM?")
    missing = [name for name in VLLM.counters.values() if name not in metrics]
    labels = metrics.list_models()
    require_model([*labels, *_list_roots(address, labels)], expected_models)
    if missing:
        raise EngineError(
            f"has no {missing[0]}: it runs without speculative decoding, or is a version with other names (those of "
            f"{', '.join(VLLM.versions)} are known)"
        )
    counters = {name: metrics.read_counter(each) for name, each in VLLM.counters.items()}
    if counters[ACCEPTED] > counters[PROPOSED]:
        raise EngineError(f"counts {counters[ACCEPTED]:,} accepted tokens of {counters[PROPOSED]:,} proposed ones")
    started = metrics.read_gauge(VLLM.others[PROCESS_START]) or metrics.read_gauge(VLLM.others[CREATED])
    version = (address.fetch_object("/version") or {}).get("version")
    version = version if isinstance(version, str) and version else None
    return Scrape(
        version=version,
        instance=None if started is None else f"start {started:.3f}",
        started=started,
        draft=None,
        counters={**counters, **_read_positions(metrics)},
        remarks=_list_remarks(version),
    )


def _read_positions(metrics: Metrics) -> dict[str, int]:
    found = metrics.read_counter_by(VLLM.others[BY_POSITION], "position")
    if len(found) > MAX_POSITIONS or not all(position.isascii() and position.isdecimal() for position in found):
        raise EngineError(
            f"{VLLM.others[BY_POSITION]}: expected up to {MAX_POSITIONS} numbered positions, found {len(found)}"
        )
    return {f"{POSITION}{int(position)}": count for position, count in found.items()}


def _list_roots(address: Address, labels: Sequence[str]) -> list[str]:
    """Return the paths of the models that are served under one of these names, by /v1/models."""
    found: Any = (address.fetch_object("/v1/models") or {}).get("data")
    models = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    served = [one for one in models if not labels or one.get("id") in labels]
    names = [one.get(key) for one in served for key in ("id", "root")]
    return [name for name in names if isinstance(name, str)]


def _list_remarks(version: str | None) -> tuple[str, ...]:
    said = "the server does not say its draft: it is taken to be the one in service when the process started"
    if version is not None and any(version.startswith(f"{known}.") for known in VLLM.versions):
        return (said,)
    found = f"vLLM {version}" if version else "a vLLM that does not say its version"
    return (said, f"{found}: the names of the counters are known of {', '.join(VLLM.versions)}; this one has the same")
