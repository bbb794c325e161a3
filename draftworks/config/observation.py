"""Options of observing servers in production: which servers, by which counters, compared over which hours. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.service import is_loopback
from draftworks.config.urls import parse_url, require_root
from draftworks.storage.names import require_name
from draftworks.storage.suggestions import suggest_or_list


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
        url = parse_url(value)
        if urlsplit(url).scheme != "https" and not is_loopback(url):
            raise ValueError("http is for this machine alone (127.0.0.1, localhost): use https, or a tunnel")
        return require_root(url)


class ObservationSpec(Spec):
    """Which hours of a server's series are compared."""

    baseline_hours: float = Field(
        default=24.0, gt=0, description="First hours of a draft on a server, with which its later ones are compared."
    )
    recent_hours: float = Field(
        default=24.0, gt=0, description="Last hours of the series, which are what the server accepts now."
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
