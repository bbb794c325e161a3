"""A streamed draft goes on without samples that fail for good; it is then the draft of a stored set without them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import failing_programs
import pytest
import yaml

from draftworks.storage.artifacts import Artifact, ArtifactStore
from resources.local_launcher import LocalJob, LocalLauncher
from resources.torch_job import RunDir, TorchJob

submit = LocalLauncher.submit


def submit_failing(self: LocalLauncher, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> LocalJob:
    """Start a job; some training samples have no valid features."""
    if job.module.endswith((".produce", ".capture")) and "eval" not in job.args[0]:
        toys = str(Path(__file__).parents[1] / "toys")
        env = {**env, "PROGRAM": job.module, "PYTHONPATH": toys}
        job = replace(job, module=failing_programs.__name__)
    return submit(self, job, env, run_dir)


def run(site: Any, streaming: dict | None) -> dg.ExecuteInProcessResult:
    entry = yaml.safe_load(site.target_file.read_text())
    entry |= {"streaming": streaming, "capture": {**entry["capture"], "max_failed_share": 0.3}}
    site.target_file.write_text(yaml.safe_dump(entry))
    with mock.patch.object(LocalLauncher, "submit", submit_failing):
        result = site.run(instance=dg.DagsterInstance.ephemeral())
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    return result


def metadata_of(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    found = [m for m in result.get_asset_materialization_events() if m.asset_key == dg.AssetKey(name)]
    return {key: value.value for key, value in found[0].materialization.metadata.items()}


def load(site: Any, asset: str) -> Artifact:
    return ArtifactStore(site.var).load_current(asset, "small")


@pytest.mark.long
def test_a_streamed_draft_without_failed_samples_is_that_of_a_stored_set_without_them(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    shutil.rmtree(site.var / "feature_store")
    for made in ("training_features", "eagle3_draft", "eagle3_report", "eagle3_export"):
        shutil.rmtree(site.var / made / "small", ignore_errors=True)
    streamed = run(site, {"watermark": {"samples": 16}})
    draft, planned = load(site, "eagle3_draft"), load(site, "training_features")
    left_out = draft.summary["left_out_samples"]
    page = metadata_of(streamed, "eagle3_draft")
    assert page["failed_samples"] == len(left_out) > 0
    assert all(sample in page["left_out_samples"] for sample in left_out)
    complete = load(finished_site, "training_features")
    assert planned.summary["planned"]
    assert planned.path.name == complete.path.name
    assert planned.summary["samples"] == complete.summary["samples"] - len(left_out)
    assert planned.summary["failed_samples"] == len(left_out)
    assert planned.data_version != complete.data_version
    assert not list((site.var / "streams").rglob("*.safetensors"))

    again = run(site, {"watermark": {"samples": 16}})
    stored = run(site, None)
    assert [metadata_of(again, name)["cache"] for name in ("training_features", "eagle3_draft")] == ["hit", "hit"]
    assert metadata_of(stored, "training_features")["cache"] == "built"
    assert metadata_of(stored, "training_features")["failed_samples"] == len(left_out)
    assert load(site, "training_features").data_version == planned.data_version
    assert metadata_of(stored, "eagle3_draft")["cache"] == "hit"
    assert load(site, "eagle3_draft").path == draft.path
