"""Features are stored where the deployment says; results made from them do not depend on that place."""

from __future__ import annotations

import dagster as dg
import pytest

from draftworks.storage.artifacts import ArtifactStore

FEATURES = {"training_features", "heldout_eval_features"}
ANSWERS = ("responses", "heldout_responses")


def captured(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Return whether each asset of a run was a hit or built, from its metadata."""
    events = result.get_asset_materialization_events()
    found = {event.asset_key.to_user_string(): event.materialization.metadata for event in events}
    return {name: metadata["cache"].value for name, metadata in found.items() if "cache" in metadata}


@pytest.mark.long
def test_in_another_kind_of_store_features_are_captured_anew_and_all_else_is_a_hit(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    (tmp_path / "shared").mkdir()
    (site.registry / "deployment.yaml").write_text("features: {kind: shared_dir, root: ../shared}\n")
    result = site.run()
    assert result.success
    built = {name for name, cache in captured(result).items() if cache == "built"}
    assert built == FEATURES
    for name in FEATURES:
        before, after = (ArtifactStore(var).load_current(name, "small") for var in (finished_site.var, site.var))
        assert after.data_version == before.data_version
        assert after.summary["verification"]["features_as_captured"]
    assert list((tmp_path / "shared").glob("*/samples/*/*.safetensors"))
    assert set(captured(site.run("prepare")).values()) == {"hit"}


@pytest.mark.slow
def test_a_copy_of_a_target_under_another_name_is_neither_asked_nor_captured_again(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    site.target_file.with_name("twin.yaml").write_text(site.target_file.read_text())
    assert site.run("prepare", partition="twin").success
    of_twin = {name: ArtifactStore(site.var).load_current(name, "twin").summary for name in [*ANSWERS, *FEATURES]}
    assert [of_twin[name]["generated_tokens"] for name in ANSWERS] == [0, 0]
    assert [of_twin[name]["captured_samples"] for name in FEATURES] == [0, 0]
    assert (
        of_twin["responses"]["samples"] == ArtifactStore(site.var).load_current("responses", "small").summary["samples"]
    )
    assert set(captured(site.run("prepare")).values()) == {"hit"}


def test_a_shared_folder_that_is_not_mounted_stops_the_run_with_its_name(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    (site.registry / "deployment.yaml").write_text("features: {kind: shared_dir, root: ../mnt}\n")
    result = site.run("prepare")
    failure = result.failure_data_for_node("training_features").user_failure_data
    assert f"{tmp_path / 'mnt'}: expected the shared folder, found none. Mount it" in failure.description
    assert not (tmp_path / "mnt").exists()
