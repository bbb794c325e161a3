"""Features are kept where the deployment says: what is made from them is the same, wherever that is."""

from __future__ import annotations

import dagster as dg
import pytest

from draftworks.artifacts import ArtifactStore

FEATURES = {"training_features", "heldout_eval_features"}


def captured(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """By asset: what was captured in this run, as the UI shows it."""
    events = result.get_asset_materialization_events()
    found = {event.asset_key.to_user_string(): event.materialization.metadata for event in events}
    return {name: metadata["cache"].value for name, metadata in found.items() if "cache" in metadata}


@pytest.mark.slow
def test_in_another_kind_of_store_features_are_captured_anew_and_all_else_is_a_hit(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    (tmp_path / "shared").mkdir()
    (site.registry / "deployment.yaml").write_text("features: {kind: shared_dir, root: ../shared}\n")
    result = site.run()
    assert result.success
    built = {name for name, cache in captured(result).items() if cache == "built"}
    assert built == FEATURES
    for name in FEATURES:
        before, after = (ArtifactStore(var).current(name, "small") for var in (finished.site.var, site.var))
        assert after.data_version == before.data_version
        assert after.summary["verification"]["features_as_captured"]
    assert list((tmp_path / "shared" / "small" / "samples").glob("*/*.safetensors"))
    assert set(captured(site.run("prepare")).values()) == {"hit"}


def test_a_shared_folder_that_is_not_mounted_stops_the_run_with_its_name(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    (site.registry / "deployment.yaml").write_text("features: {kind: shared_dir, root: ../mnt}\n")
    result = site.run("prepare")
    failure = result.failure_data_for_node("training_features").user_failure_data
    assert f"{tmp_path / 'mnt'}: expected the shared folder, found none. Mount it" in failure.description
    assert not (tmp_path / "mnt").exists()
