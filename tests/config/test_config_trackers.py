"""Options of trackers: what is refused before a run, and when Weights & Biases is online."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from draftworks.config.trackers import TrackersSpec, WandbSpec, require_trackers
from draftworks.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"mlflow": {"uri": "runs"}}, "sqlite:////"),
        ({"mlflow": {"uri": "sqlite:///relative.db"}}, "four slashes"),
        ({"mlflow": {"uri": "http://me:secret@host"}}, "must not contain a user or password"),
        ({"mlflow": {}}, "uri"),
        ({"trackio": {"folder": "curves"}}, "absolute path"),
        ({"comet": {}}, "comet"),
        ({"wandb": {"project": ""}}, "project"),
    ],
)
def test_what_cannot_work_is_refused(values: dict, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as refused:
        TrackersSpec.model_validate(values)
    assert "secret" not in str(refused.value.errors(include_input=False))


def test_wandb_is_online_where_there_is_a_key() -> None:
    assert WandbSpec().resolve_mode({}) == "offline"
    assert WandbSpec().resolve_mode({"WANDB_API_KEY": " "}) == "offline"
    assert WandbSpec().resolve_mode({"WANDB_API_KEY": "k"}) == "online"
    assert WandbSpec(mode="offline").resolve_mode({"WANDB_API_KEY": "k"}) == "offline"


def test_online_without_a_key_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.config.trackers.find_spec", lambda name: SimpleNamespace(origin="a"))
    spec = TrackersSpec(wandb=WandbSpec(mode="online"))
    with pytest.raises(ConfigError, match="target t: no WANDB_API_KEY|WANDB_API_KEY: set it where trainings run"):
        require_trackers(spec, "target t", {})
    require_trackers(spec, "target t", {"WANDB_API_KEY": "k"})


def test_a_folder_of_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.config.trackers.find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(ConfigError, match=r"trackio is not installed: pip install -e '\.\[trackio\]'"):
        require_trackers(TrackersSpec.model_validate({"trackio": {}}), "target t")
