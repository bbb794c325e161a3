"""One reading of an SGLang server: /metrics (--enable-metrics) and /server_info."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from draftworks.errors import EngineError
from draftworks.production.scrape import Address, Scrape, require_model
from draftworks.sglang.counters import LENGTH, PASSES, SGLANG, Metrics


def scrape_sglang(address: Address, expected_models: Collection[str]) -> Scrape:
    """Read an SGLang server.

    Raises:
        EngineError: it cannot be reached, has no metrics, serves another model, does not speculate, or its answers are not
            what SGLang sends.
    """
    info = address.fetch_object("/server_info") or {}
    metrics = address.fetch_metrics(SGLANG, "start SGLang with --enable-metrics")
    if not metrics.prefixed and not info:
        raise EngineError(f"has neither /server_info nor a metric {SGLANG.prefix}…: is it SGLang?")
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
        gauge=metrics.read_gauge(SGLANG.others[LENGTH]) or None,  # SGLang sets it to 0 where no pass ran lately
        remarks=_list_remarks(info, version, counters),
    )


def _read_counters(metrics: Metrics, version: str | None) -> dict[str, int]:
    """Return the counters; 0 for those that a version which is known to have them did not count yet; {} without them."""
    if version not in SGLANG.versions and SGLANG.counters[PASSES] not in metrics:
        return {}
    return {name: metrics.read_counter(each) if each in metrics else 0 for name, each in SGLANG.counters.items()}


def _name_draft(info: Mapping[str, Any]) -> str | None:
    path = _read_text(info, "speculative_draft_model_path")
    algorithm = _read_text(info, "speculative_algorithm")
    return path or (None if algorithm is None else f"{algorithm} without a draft model")


def _list_remarks(info: Mapping[str, Any], version: str | None, counters: Mapping[str, int]) -> tuple[str, ...]:
    found = []
    if version not in SGLANG.versions:
        said = f"SGLang {version}" if version else "a server that does not say its version"
        found.append(f"{said}: the names of the counters are known of {', '.join(SGLANG.versions)} alone")
    if not info:
        found.append("no /server_info: the draft is taken to be the one in service")
    if not counters:
        found.append(f"no counters, only the gauge {SGLANG.others[LENGTH]} of the last batches: no interval")
    return tuple(found)


def _read_text(info: Mapping[str, Any], name: str) -> str | None:
    value = info.get(name)
    return value if isinstance(value, str) and value else None
