"""Several jobs that share the work of one partition make what one job makes."""

from __future__ import annotations

import dagster as dg

from draftworks.storage.artifacts import Artifact, ArtifactStore

MADE = ("conversations", "responses", "tokenized_train", "training_features")


def prepare(site, workers: int) -> None:
    (site.registry / "deployment.yaml").write_text(
        f"launcher: {{programs: {{capture: {{workers: {workers}}}, regenerate: {{workers: {workers}}}}}}}\n"
    )
    selection = [*MADE, "target_model", "dataset", "recipe"]
    result = site.run("prepare", asset_selection=[dg.AssetKey(name) for name in selection])
    assert result.success, [event.message for event in result.all_events if event.is_failure]


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
