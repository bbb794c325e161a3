"""A target with `streaming` gets the same assets: planned features, and a draft trained while they are captured."""

from __future__ import annotations

import shutil
from typing import Any

import dagster as dg
import pytest
import yaml

from draftworks.storage.artifacts import ArtifactStore

INPUTS = ("target_model", "dataset", "recipe", "evaluation_recipe", "eagle3_recipe")


@pytest.fixture(scope="module")
def streamed(finished_site, tmp_path_factory) -> Any:
    """The finished site without its training features and its draft, which are made again with `streaming`."""
    site = finished_site.copy(tmp_path_factory.mktemp("streamed"))
    made_again = ("training_features", "eagle3_draft")
    for made in made_again:
        shutil.rmtree(site.var / made / "small", ignore_errors=True)
    set_streaming(site, {"watermark": {"samples": 16}})
    selection = [dg.AssetKey(name) for name in (*INPUTS, *made_again)]
    result = site.run(asset_selection=selection, instance=dg.DagsterInstance.ephemeral())
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    return site, result


def set_streaming(site: Any, streaming: dict | None) -> None:
    entry = yaml.safe_load(site.target_file.read_text())
    site.target_file.write_text(yaml.safe_dump({**entry, "streaming": streaming}))


def metadata_of(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    found = [m for m in result.get_asset_materialization_events() if m.asset_key == dg.AssetKey(name)]
    return {key: value.value for key, value in found[0].materialization.metadata.items()}


def test_planned_features_have_the_data_version_of_stored_ones(streamed, finished_site):
    site, _ = streamed
    artifacts, stored = ArtifactStore(site.var), ArtifactStore(finished_site.var)
    planned = artifacts.load_current("training_features", "small")
    assert planned.summary["planned"]
    assert planned.data_version == stored.load_current("training_features", "small").data_version


def test_the_streamed_draft_has_the_identity_of_the_stored_one_and_learns_the_same(streamed, finished_site):
    site, _ = streamed
    found, expected = (
        ArtifactStore(root).load_current("eagle3_draft", "small") for root in (site.var, finished_site.var)
    )
    assert found.path.name == expected.path.name
    assert found.summary["steps"] == expected.summary["steps"]
    assert found.summary["last_loss"] == pytest.approx(expected.summary["last_loss"], rel=1e-3)


def test_the_run_page_says_what_the_producers_did(streamed):
    _, result = streamed
    metadata = metadata_of(result, "eagle3_draft")
    assert metadata["streamed_samples"] == metadata_of(result, "training_features")["dagster/row_count"]
    assert 0 <= metadata["producer_waiting_share"] <= 1
    assert metadata["trainer_waited_s"] > 0


def test_nothing_of_the_stream_is_left(streamed):
    site, _ = streamed
    assert not list((site.var / "streams").rglob("*.safetensors"))
    assert not list((site.var / "streams").rglob("*.sqlite"))


def test_a_stored_set_and_its_draft_are_hits_when_streaming_is_turned_on(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    set_streaming(site, {})
    result = site.run(instance=dg.DagsterInstance.ephemeral())
    assert result.success
    assert metadata_of(result, "training_features")["cache"] == "hit"
    assert metadata_of(result, "eagle3_draft")["cache"] == "hit"


def test_a_planned_set_is_captured_when_streaming_is_turned_off(streamed):
    site, _ = streamed
    set_streaming(site, None)
    result = site.run(job="prepare", instance=dg.DagsterInstance.ephemeral())
    assert result.success
    assert metadata_of(result, "training_features")["cache"] == "built"
    assert not ArtifactStore(site.var).load_current("training_features", "small").summary.get("planned")
