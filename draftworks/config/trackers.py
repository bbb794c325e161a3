"""Options of experiment trackers: services that show the curves of trainings side by side. Torch-free.

Keys and passwords are read by the libraries from their own environment variables, never from the registry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from draftworks.config.base import Spec
from draftworks.config.urls import parse_url
from draftworks.errors import ConfigError

WANDB_KEY = "WANDB_API_KEY"


class WandbSpec(Spec):
    """Weights & Biases."""

    project: str = Field(default="draftworks", min_length=1, description="Project that the runs are in.")
    entity: str | None = Field(default=None, description="User or team of the project; default: the key's own.")
    mode: Literal["auto", "online", "offline"] = Field(
        default="auto",
        description="auto: online where the environment has WANDB_API_KEY, else offline, in `trackers/` beside the draft, "
        "for `wandb sync`.",
    )

    def resolve_mode(self, environment: Mapping[str, str]) -> Literal["online", "offline"]:
        if self.mode != "auto":
            return self.mode
        return "online" if environment.get(WANDB_KEY, "").strip() else "offline"


class MlflowSpec(Spec):
    """MLflow's tracking."""

    uri: str = Field(
        description="Address of the tracking server (http, https), or an SQLite file as sqlite:////absolute/path.db."
    )
    experiment: str = Field(default="draftworks", min_length=1, description="Experiment that the runs are in.")

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, value: str) -> str:
        if value.startswith("sqlite:////"):
            return value
        if urlsplit(value).scheme in ("http", "https"):
            return parse_url(value)
        raise ValueError("expected http(s)://HOST:PORT or sqlite:////ABSOLUTE/PATH.db (four slashes)")


class TrackioSpec(Spec):
    """Trackio, which keeps its curves in a folder of this machine."""

    project: str = Field(default="draftworks", min_length=1, description="Project that the runs are in.")
    folder: str | None = Field(
        default=None, description="Absolute path of the folder; default: TRACKIO_DIR, or Hugging Face's cache."
    )

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_absolute():
            raise ValueError(f"expected an absolute path, found {value}")
        return value


class TrackersSpec(Spec):
    """Experiment trackers that a training reports to, beside TensorBoard. Each needs the extra of its name."""

    wandb: WandbSpec | None = Field(default=None, description="Weights & Biases; {} for its defaults.")
    mlflow: MlflowSpec | None = Field(default=None, description="MLflow.")
    trackio: TrackioSpec | None = Field(default=None, description="Trackio; {} for its defaults.")

    def list_kinds(self) -> list[str]:
        """Return the names of the trackers that are on."""
        return [name for name in TrackersSpec.model_fields if getattr(self, name) is not None]


def require_tensorboard(wanted: bool, where: str) -> None:
    """Raise ConfigError if TensorBoard is wanted and missing here."""
    if wanted and not _is_installed("tensorboard"):
        raise ConfigError(f"{where}: TensorBoard is not installed: pip install -e '.[tensorboard]', or turn it off")


def require_trackers(spec: TrackersSpec, where: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a tracker's package, or the key that it needs, is missing here."""
    missing = [kind for kind in spec.list_kinds() if not _is_installed(kind)]
    if missing:
        raise ConfigError(
            f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install -e "
            f"'.[{','.join(missing)}]', or leave {'it' if len(missing) == 1 else 'them'} out"
        )
    wandb = spec.wandb
    if wandb is not None and wandb.mode == "online" and not environment.get(WANDB_KEY, "").strip():
        raise ConfigError(
            f"{where}.wandb: mode online, but the environment has no {WANDB_KEY}: set it where trainings run, or use mode "
            "offline"
        )


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # without: a mere folder, as wandb leaves where it ran
