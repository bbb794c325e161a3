"""Several jobs that share the work of one partition make what one job makes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from draftworks.config.launchers import LocalLauncherSpec
from draftworks.config.run_files import WORKER_FIGURES
from draftworks.storage.artifacts import Artifact, ArtifactStore
from resources.job_claims import CLAIM
from resources.torch_launcher import JobResult
from spec_assets import workers as shared_work

MADE = ("conversations", "responses", "tokenized_train", "training_features")


def prepare(site, workers: int) -> None:
    (site.registry / "deployment.yaml").write_text(
        f"launcher: {{programs: {{capture: {{workers: {workers}}}, regenerate: {{workers: {workers}}}}}}}\n"
    )
    selection = [*MADE, "target_model", "dataset", "recipe"]
    result = site.run("prepare", asset_selection=[dg.AssetKey(name) for name in selection])
    assert result.success, [event.message for event in result.all_events if event.is_failure]


@pytest.mark.long
def test_workers_change_no_result(site, tmp_path_factory):
    site.write_chats(40)
    sites = [site, site.copy(tmp_path_factory.mktemp("shared"))]
    for each, workers in zip(sites, (1, 3), strict=True):
        prepare(each, workers)

    def load(name: str) -> list[Artifact]:
        return [ArtifactStore(site.var).load_current(name, "small") for site in sites]

    for name in MADE:
        one, three = load(name)
        assert one.path.name == three.path.name, "workers are in no identity"
        assert one.data_version == three.data_version
        assert one.files.keys() == three.files.keys()
    one, three = load("training_features")
    assert one.summary["captured_samples"] == three.summary["captured_samples"]
    folders = {path.name for path in sites[1].var.glob("runs/*/*/*") if path.is_dir()}
    assert folders >= {"capture-1", "capture-2", "regenerate-1", "regenerate-2"}


@dataclass(frozen=True)
class Run:
    """What a worker is told."""

    def model_copy(self, update: dict[str, Any]) -> Run:
        return self


@pytest.mark.parametrize("claimed", [True, False], ids=["ended unheard", "of before"])
def test_figures_count_of_a_worker_that_ended_while_no_run_waited_and_not_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
):
    """As long as there is a claim, workers of this very job may have ended after their run was killed."""
    out = tmp_path / shared_work.FOLDER / "features" / "one" / "capture-1"
    out.mkdir(parents=True)
    (out / WORKER_FIGURES).write_text(json.dumps({"captured_samples": 4}))
    if claimed:
        (out.parent / f"capture-1.{CLAIM}").touch()
    monkeypatch.setattr(shared_work, "make_companion", lambda *arguments: None)
    monkeypatch.setattr(shared_work, "launch", lambda *arguments: JobResult({"captured_samples": 5}, {}))
    workspace: Any = SimpleNamespace(
        var=tmp_path, resolve_launcher=lambda target, program: LocalLauncherSpec(workers=2)
    )
    context: Any = SimpleNamespace(partition_key="one", asset_key=dg.AssetKey("features"))
    launcher: Any = SimpleNamespace(has_arrays=lambda place: False)
    run: Any = Run()
    found = shared_work.launch_workers(context, launcher, workspace, "capture", run, 1, "cpu")
    assert found.report["captured_samples"] == (9 if claimed else 5)
    assert not out.exists(), "what was counted is not counted again"
