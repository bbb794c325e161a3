"""Options of operation, and `registry/deployment.yaml`, settings of an installation independent of its targets. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec, show
from draftworks.config.capture import SGLangSpec, VLLMSpec
from draftworks.config.features import FeaturesSpec, ObjectStorageSpec, PublishSpec
from draftworks.config.launchers import KINDS, AnyLauncherSpec, LauncherSpec, LocalLauncherSpec, parse_launcher
from draftworks.config.service import LEAST_PROMPTS
from draftworks.config.urls import parse_url, require_private
from draftworks.errors import ConfigError
from draftworks.storage.identity import digest
from draftworks.storage.names import require_name
from draftworks.storage.words import suggest


class DecisionSpec(Spec):
    """When the draft in service is kept, tuned or trained anew, and whether that happens by itself."""

    tune_margin: float = Field(
        default=0.05,
        ge=0,
        description="Accepted tokens per pass (walk, rung 3) that the draft in service may lose: where the whole 95% "
        "interval of the loss is at or below this, the draft is kept; where the whole interval is above, it is tuned.",
    )
    retrain_margin: float = Field(
        default=0.15,
        gt=0,
        description="Where the whole interval of the loss is above this, the draft is trained anew.",
    )
    least_prompts: int = Field(
        default=LEAST_PROMPTS, ge=1, description="Prompts that an eval set has to have; with fewer it is undecided."
    )
    act: Literal["none", "tune", "retrain"] = Field(
        default="none",
        description="What is started without being asked for: nothing; tunes; tunes and trainings from the start.",
    )
    traffic: float = Field(
        default=1.0, ge=0, description="Weight of the target where several wait: the largest traffic x loss is first."
    )
    hold: bool = Field(default=False, description="Starts nothing for this target, whatever is decided.")

    @model_validator(mode="after")
    def _check_margins(self) -> DecisionSpec:
        if self.tune_margin >= self.retrain_margin:
            raise ValueError(
                f"tune_margin {self.tune_margin:g} contradicts retrain_margin {self.retrain_margin:g}: it has to be below it, as "
                "only a small loss is tuned away. Lower it, or raise the other"
            )
        return self


class BudgetSpec(Spec):
    """How much the trainings take at most that decisions start, and how long one waits that failed."""

    gpu_hours_per_week: float = Field(
        ge=0,
        description="GPU-hours (ranks x wall hours; on CPU too) that such trainings take at most in any 7 days.",
    )
    unknown_gpu_hours: float | None = Field(
        default=None,
        gt=0,
        description="Estimate for a training whose cost is not known from an earlier one; null: it waits for a person.",
    )
    backoff_hours: float = Field(
        default=1.0, gt=0, description="Pause after a training that failed; doubled with each failure in a row."
    )
    longest_backoff_hours: float = Field(default=168.0, gt=0, description="Longest such pause.")

    @model_validator(mode="after")
    def _check_pauses(self) -> BudgetSpec:
        if self.longest_backoff_hours < self.backoff_hours:
            raise ValueError(
                f"longest_backoff_hours {self.longest_backoff_hours:g} is shorter than backoff_hours "
                f"{self.backoff_hours:g}: raise it"
            )
        return self


ITEM = re.compile(r"(?:(?P<all>\*)|(?P<first>[0-9]+|[A-Za-z]+)(?:-(?P<last>[0-9]+|[A-Za-z]+))?)(?:/(?P<step>[0-9]+))?")
LONGEST_MONTHS = {month: 30 if month in (4, 6, 9, 11) else 31 for month in range(1, 13)} | {2: 29}


@dataclass(frozen=True)
class CronField:
    """One of the five fields of a cron expression: its name, its range, and names for its numbers."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def parse(self, text: str) -> set[int]:
        """Return the numbers that the text of a field selects.

        Raises:
            ValueError: it is malformed, or a number is outside the range of the field.
        """
        return {value for item in text.split(",") for value in self._parse_item(item)}

    def _parse_item(self, item: str) -> range:
        found = ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"{self.name}: expected *, a number, a range a-b or a list, each with an optional /step")
        step = self._parse_number(found["step"], 1, self.high) if found["step"] else 1
        if found["all"]:
            return range(self.low, self.high + 1, step)
        first = self._parse_number(found["first"], self.low, self.high)
        last = self._parse_number(found["last"], self.low, self.high) if found["last"] else first
        if last < first:
            raise ValueError(f"{self.name}: the range {item} ends before it begins")
        return range(first, (self.high if found["step"] and not found["last"] else last) + 1, step)

    def _parse_number(self, text: str, low: int, high: int) -> int:
        named = dict(zip(self.names, range(self.low, self.high + 1)))
        number = int(text) if text.isdigit() else named.get(text.lower())
        if number is None or not low <= number <= high:
            raise ValueError(f"{self.name}: {text} is outside {low}..{high}")
        return number


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FIELDS = (
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day of month", 1, 31),
    CronField("month", 1, 12, MONTHS),
    CronField("day of week", 0, 7, WEEKDAYS),
)


def parse_cron(text: str) -> str:
    """Return a cron expression with its fields separated by single spaces.

    Raises:
        ValueError: it does not have five fields, a field is invalid, or the date never occurs (30 February).
    """
    parts = text.split()
    if len(parts) != len(FIELDS):
        names = ", ".join(field.name for field in FIELDS)
        raise ValueError(f"expected a cron expression of five fields ({names}), found {len(parts)}")
    _, _, days, months, _ = (field.parse(part) for field, part in zip(FIELDS, parts))
    if parts[4] == "*" and min(days) > max(LONGEST_MONTHS[month] for month in months):
        raise ValueError(f"no month of {sorted(months)} has a day {min(days)}: this time never occurs")
    return " ".join(parts)


def require_timezone(name: str) -> str:
    """Return `name` if it is a time zone; raise ValueError otherwise."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        hint = suggest(name, sorted(available_timezones())) or "expected an IANA name such as UTC or Europe/Berlin"
        raise ValueError(f"found {name[:40]!r}, which is not a time zone; {hint}") from None
    return name


class PricesSpec(Spec):
    """Prices with which `draftworks plan` turns hours and bytes into money."""

    gpu_hour: float = Field(
        default=0.0, ge=0, description="One GPU for one hour; a process on the CPU counts as a GPU does."
    )
    storage_gb_month: float = Field(default=0.0, ge=0, description="10^9 bytes of features and results for one month.")
    currency: str = Field(default="USD", min_length=1, max_length=16, description="Name of the currency, as shown.")


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


def require_distinct(channels: list[NotificationSpec]) -> list[NotificationSpec]:
    """Return the channels; raise ValueError if two have the same name."""
    names = [each.channel for each in channels]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"several channels are {', '.join(repeated)}: give each a name of its own")
    return channels


Kind = Literal[
    "drafts", "reports", "exports", "data", "features", "eval_features", "answers", "models", "runs", "unfinished"
]


class RetentionSpec(Spec):
    """What `draftworks prune` may remove: nothing that a result in use was made from, and nothing young."""

    keep_days: float = Field(
        default=7.0, ge=0, description="Days for which everything is kept after it was last written to."
    )
    runs_days: float = Field(default=30.0, ge=0, description="Days for which logs and run files of a run are kept.")
    budget_gb: dict[Kind, float] = Field(
        default_factory=dict,
        description="GB by kind; what nothing refers to goes, the cheapest to make again first, until the kind has no "
        "more. A kind without a budget keeps nothing that nothing refers to.",
    )
    cron: str | None = Field(default=None, description="When to prune by a schedule; default: only by command.")

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, value: str | None) -> str | None:
        return None if value is None else parse_cron(value)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes by kind."""
        return {kind: round(size * 1e9) for kind, size in self.budget_gb.items()}


class DeploymentSpec(Spec):
    """`registry/deployment.yaml`: settings of this installation, independent of the targets."""

    var: str = Field(default="../var", description="Folder that runs write to, relative to the registry.")
    launcher: AnyLauncherSpec = Field(default_factory=LocalLauncherSpec)
    features: FeaturesSpec = Field(default_factory=FeaturesSpec)
    object_storage: ObjectStorageSpec = Field(
        default_factory=ObjectStorageSpec,
        description="How buckets of features, published results and data are reached.",
    )
    publish: PublishSpec | None = Field(
        default=None, description="Object storage that exports and reports are copied to; default: none."
    )
    sglang: SGLangSpec = Field(default_factory=SGLangSpec)
    vllm: VLLMSpec = Field(default_factory=VLLMSpec)
    retention: RetentionSpec = Field(default_factory=RetentionSpec, description="What may be removed, and when.")
    prices: PricesSpec | None = Field(
        default=None, description="What GPUs and storage cost, for `draftworks plan`; default: plans name no money."
    )
    budget: BudgetSpec | None = Field(
        default=None,
        description="GPU-hours for trainings that decisions start; null: none starts by itself.",
    )
    notifications: list[NotificationSpec] = Field(
        default_factory=list, description="Channels that people are told by of failures, decisions, promotions."
    )
    ui_url: str | None = Field(
        default=None, description="Address of Dagster's UI, for links in notifications; default: none are given."
    )
    automation: bool = Field(
        default=False, description="Evaluate drafts again automatically: on schedule, and after changes."
    )
    reevaluation_interval_s: int = Field(default=60, ge=1, description="Seconds between two checks for such changes.")

    @field_validator("notifications")
    @classmethod
    def _check_channels(cls, value: list[NotificationSpec]) -> list[NotificationSpec]:
        return require_distinct(value)

    @field_validator("ui_url")
    @classmethod
    def _check_ui_url(cls, value: str | None) -> str | None:
        return None if value is None else parse_url(value)

    @field_validator("launcher", mode="plain")
    @classmethod
    def _choose_launcher(cls, value: Any) -> LauncherSpec:
        if isinstance(value, LauncherSpec):
            return value
        if not isinstance(value, Mapping):
            hint = f"; did you mean {{kind: {value}}}?" if isinstance(value, str) and value in KINDS else ""
            raise ValueError(f"expected keys with values, found {show(value, 40)}{hint}")
        try:
            return parse_launcher(value, "launcher")
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("launcher: ").replace("\nlauncher: ", "; ")) from error
