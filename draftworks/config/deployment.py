"""Model of `registry/deployment.yaml`: settings of an installation, independent of its targets. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from draftworks.config.base import Spec
from draftworks.config.capture import SGLangSpec
from draftworks.config.features import FeaturesSpec, ObjectStorageSpec, PublishSpec
from draftworks.config.launchers import KINDS, AnyLauncherSpec, LauncherSpec, LocalLauncherSpec, parse_launcher
from draftworks.config.operations import BudgetSpec, NotificationSpec, PricesSpec, RetentionSpec, require_distinct
from draftworks.config.plain_errors import show
from draftworks.config.urls import parse_url
from draftworks.errors import ConfigError


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
