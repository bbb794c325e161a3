"""Options of observing servers in production: their counters, and logs of their requests. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field, field_validator

from draftworks.config.base import DistinctNames, EnvironmentName, Spec, show
from draftworks.config.urls import is_url, parse_url, require_private, require_root
from draftworks.storage.names import HELDOUT, require_name
from draftworks.storage.words import suggest_or_list


class ObservedServerSpec(Spec):
    """One server that serves the target with a draft, and whose counters `draftworks observe` reads."""

    name: str = Field(description="Name of the server's series; a series is kept when its address changes.")
    url: str = Field(description="Address of the one server, not of a load balancer: https, or http on this machine.")
    kind: Literal["sglang", "vllm"] = Field(description="Whose metrics it has at /metrics.")
    strategy: str = Field(description="Strategy of the target whose draft it serves.")
    model: str | None = Field(
        default=None, description="Name or path of the model, as the server gives it; default: the target's `model`."
    )
    api_key_env: EnvironmentName | None = Field(
        default=None, description="Name of the environment variable with a key, sent as a bearer token."
    )
    timeout_s: float = Field(default=10.0, gt=0, le=60, description="Time limit of one request.")

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return require_name(value)

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return require_root(require_private(parse_url(value)))


class RequestsSpec(Spec):
    """Logs of served requests, a line for each, and what is made of them."""

    files: DistinctNames = Field(
        min_length=1,
        description="Logs, relative to the registry; globs allowed: of the recording proxy, of gateways, of SGLang.",
    )
    source_field: str | None = Field(
        default=None, description="Field of a gateway's lines that becomes the slice `source`, such as metadata.app."
    )
    model: str | None = Field(
        default=None, description="Name by which answers call the target, where `model` and `servers` do not give it."
    )
    strategy: str | None = Field(
        default=None,
        description="Strategy whose draft answered the lines of a server that `servers` does not name; default: the only one.",
    )
    eval_set: str = Field(default=HELDOUT, description="Eval set of the report that served requests stand beside.")
    max_lines: int = Field(
        default=1_000_000, ge=1, description="Most lines that are read, the last ones of the newest files."
    )
    decide: bool = Field(
        default=False,
        description="Whether what requests lost since the draft's first hours is decided about, as an eval set is.",
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, value: list[str]) -> list[str]:
        for each in filter(is_url, value):
            raise ValueError(
                f"expected files of this machine, found {show(each, 60)}: give the folder that logs are in"
            )
        return value


class ObservationSpec(Spec):
    """Which hours of a server's series, and of logged requests, are compared."""

    baseline_hours: float = Field(
        default=24.0, gt=0, description="First hours of a draft on a server, with which its later ones are compared."
    )
    recent_hours: float = Field(
        default=24.0, gt=0, description="Last hours of the series, which are what the server accepts now."
    )
    requests: RequestsSpec | None = Field(
        default=None, description="Logs of served requests; null: servers are observed by their counters alone."
    )


def check_servers(servers: Sequence[ObservedServerSpec], strategies: Collection[str]) -> None:
    """Raise ValueError for a repeated name or address, or a strategy that the target does not have."""
    for server in servers:
        if server.strategy not in strategies:
            raise ValueError(
                f"servers: {server.name}: the target has no strategy {server.strategy}; "
                f"{suggest_or_list(server.strategy, strategies)}"
            )
    for what in ("name", "url"):
        values = [getattr(server, what) for server in servers]
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(f"servers: the {what} {repeated[0]} is given to more than one server")


def check_requests(requests: RequestsSpec | None, strategies: Collection[str], evals: Sequence[str]) -> None:
    """Raise ValueError for a strategy or an eval set that the target does not have, or a strategy that is not clear."""
    if requests is None:
        return
    chosen = (("strategy", requests.strategy, strategies), ("eval_set", requests.eval_set, [HELDOUT, *evals]))
    for what, name, known in chosen:
        if name is not None and name not in known:
            raise ValueError(
                f"observation.requests.{what}: the target has no {name}; {suggest_or_list(name, list(known))}"
            )


def list_observed_strategies(
    servers: Sequence[ObservedServerSpec], requests: RequestsSpec | None, strategies: Sequence[str]
) -> list[str]:
    """Return the strategies of a target whose drafts are observed: those of its servers, and that of its other logs."""
    found = {server.strategy for server in servers}
    if requests is not None and requests.strategy is not None:
        found.add(requests.strategy)
    elif requests is not None and len(strategies) == 1:
        found.update(strategies)
    return sorted(found)
