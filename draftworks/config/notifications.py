"""Options of notifications: who is told of what. Torch-free."""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.service import is_loopback
from draftworks.config.urls import parse_url
from draftworks.storage.identity import digest
from draftworks.storage.names import require_name

EventKind = Literal["failure", "regression", "decision", "promotion", "rollback", "hold"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


class NotificationSpec(Spec):
    """One channel that people are told by: an incoming webhook of Slack, or any address that takes JSON."""

    kind: Literal["slack", "webhook"] = Field(description="slack: its incoming webhook. webhook: JSON with the events.")
    name: str | None = Field(
        default=None,
        description="Name of the channel; its unsent messages are kept under it. Default: made of kind and address.",
    )
    url_env: EnvironmentName | None = Field(
        default=None,
        min_length=1,
        description="Name of the environment variable with the address, where it contains a token, as Slack's do.",
    )
    url: str | None = Field(
        default=None, description="The address of a webhook without a token: https, or http on this machine."
    )
    api_key_env: EnvironmentName | None = Field(
        default=None,
        min_length=1,
        description="Name of the environment variable with a key, sent to a webhook as a bearer token.",
    )
    events: list[EventKind] = Field(
        default=list(EVENT_KINDS), min_length=1, description="What is told; default: everything."
    )
    targets: list[str] | None = Field(default=None, description="Names of the targets; default: all.")
    max_messages: int = Field(
        default=6, ge=1, description="Messages per `window_s`; more events are collected into one message."
    )
    window_s: float = Field(default=600.0, gt=0, le=86400, description="Seconds that max_messages is counted over.")
    timeout_s: float = Field(default=10.0, gt=0, le=30, description="Time limit of one attempt.")

    @property
    def channel(self) -> str:
        """The name under which messages are kept."""
        return self.name or f"{self.kind}-{digest(self.url_env or self.url)[:8]}"

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        return None if value is None else require_name(value)

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else require_private(parse_url(value))

    @model_validator(mode="after")
    def _check_address(self) -> NotificationSpec:
        if (self.url is None) == (self.url_env is None):
            raise ValueError("a channel has either url or url_env: give one of them")
        if self.kind == "slack" and self.url is not None:
            raise ValueError("Slack's address contains a token: put it into an environment variable, named by url_env")
        if self.kind == "slack" and self.api_key_env is not None:
            raise ValueError("Slack's webhook takes no key: leave api_key_env out")
        return self

    def wants(self, kind: str, target: str) -> bool:
        """Whether the channel is told of such an event. One that is of no target is told to all."""
        return kind in self.events and (self.targets is None or not target or target in self.targets)


def require_private(url: str) -> str:
    """Return an address that others on the way cannot read along; the error does not repeat it."""
    if urlsplit(url).scheme != "https" and not is_loopback(url):
        raise ValueError("http is for this machine alone (127.0.0.1, localhost): use https")
    return url


def require_distinct(channels: list[NotificationSpec]) -> list[NotificationSpec]:
    """Return the channels; raise ValueError if two have the same name."""
    names = [each.channel for each in channels]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"several channels are {', '.join(repeated)}: give each a name of its own")
    return channels
