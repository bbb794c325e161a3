"""The whole graph with its features in a real S3 server: the same draft, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from s3_server import BUCKET, S3Server, set_keys

from draftworks.storage.artifacts import ArtifactStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
MADE_OF_FEATURES = ("training_features", "heldout_eval_features", "eagle3_draft", "eagle3_report", "eagle3_export")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    running.start()
    yield running
    running.kill()


def write_deployment(site: Any, server: S3Server, user: str = "WRITER") -> None:
    set_keys(os.environ)
    access = server.access(user).model_dump(exclude_defaults=True)
    deployment = {
        "features": {"kind": "s3", "url": f"s3://{BUCKET}/features", "cache_gb": 1},
        "publish": {"url": f"s3://{BUCKET}/published"},
        "object_storage": {"buckets": {BUCKET: access}},
    }
    (site.registry / "deployment.yaml").write_text(yaml.safe_dump(deployment))


@pytest.fixture(scope="module")
def stored_away(finished_site: Any, server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The finished site without its features and all that follows from them, run again with features on the server."""
    site = finished_site.copy(tmp_path_factory.mktemp("away"))
    for made in ("feature_store", "eval_cache", *MADE_OF_FEATURES):
        shutil.rmtree(site.var / made, ignore_errors=True)
    write_deployment(site, server)
    result = site.run(instance=dg.DagsterInstance.ephemeral())
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    return site


def cache_states(result: dg.ExecuteInProcessResult) -> set[Any]:
    made = [event.materialization.metadata for event in result.get_asset_materialization_events()]
    return {metadata["cache"].value for metadata in made if "cache" in metadata}


def read_files(var: Path, asset: str) -> dict[str, bytes]:
    folder = ArtifactStore(var).load_current(asset, "small").path
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_the_draft_is_that_of_local_features_bit_for_bit(finished_site: Any, stored_away: Any):
    for asset in ("eagle3_draft", "eagle3_export"):
        expected, found = read_files(finished_site.var, asset), read_files(stored_away.var, asset)
        assert expected
        weights = [name for name in expected if "checkpoints" not in name]
        assert weights
        assert [name for name in weights if expected[name] != found[name]] == []
    for asset in ("training_features", "heldout_eval_features", "eagle3_draft"):
        found, expected = (
            ArtifactStore(root).load_current(asset, "small") for root in (stored_away.var, finished_site.var)
        )
        assert (found.path.name, found.data_version) == (expected.path.name, expected.data_version), asset


def test_features_are_on_the_server_alone(stored_away: Any, server: S3Server):
    assert not (stored_away.var / "feature_store").exists()
    names = [found.path for found in server.connect("features").list()]
    assert any("/shards/" in name for name in names)
    assert any(name.endswith("/index/0000000000.json") for name in names)
    assert (stored_away.var / "feature_cache").is_dir()


def test_exports_and_reports_are_published_and_the_pointer_names_them(stored_away: Any, server: S3Server):
    published = server.connect("published/eagle3_export/small")
    folder = json.loads(published.read("current.json").content)["folder"]
    made = ArtifactStore(stored_away.var).load_current("eagle3_export", "small")
    assert folder.startswith(made.path.name)
    for name in made.files:
        assert published.read(f"{folder}/{name}").content == (made.path / name).read_bytes(), name
    assert server.connect("published/eagle3_report/small").inspect("current.json") is not None


def test_keys_are_in_no_file_of_the_deployment(stored_away: Any):
    secrets = [b"a secret to write", b"writer-key"]
    found = [
        path
        for path in stored_away.root.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
    ]
    assert found == []


def test_an_unchanged_run_is_a_series_of_hits(stored_away: Any, server: S3Server):
    published = server.connect("published/eagle3_report/small")
    before = [found.path for found in published.list()]
    again = stored_away.run(instance=dg.DagsterInstance.ephemeral())
    assert again.success
    assert cache_states(again) == {"hit"}
    assert [found.path for found in published.list()] == before


def test_conversations_on_the_server_are_the_same_data(stored_away: Any, server: S3Server):
    server.connect("chats").upload("deep/part.jsonl", stored_away.chats)
    entry = stored_away.registry / "datasets" / "chats.yaml"
    entry.write_text(f"files: ['s3://{BUCKET}/chats/**/*.jsonl']\n")
    stored_away.chats.unlink()
    again = stored_away.run(instance=dg.DagsterInstance.ephemeral())
    assert again.success, [event.message for event in again.all_events if event.is_failure]
    assert cache_states(again) == {"hit"}


def test_keys_that_may_not_write_end_the_capture_before_anything_is_computed(
    finished_site: Any, server: S3Server, tmp_path: Path
):
    site = finished_site.copy(tmp_path)
    for made in ("feature_store", "eval_cache", *MADE_OF_FEATURES):
        shutil.rmtree(site.var / made, ignore_errors=True)
    write_deployment(site, server, "READER")
    text = (site.registry / "deployment.yaml").read_text().replace("/features", "/others")
    (site.registry / "deployment.yaml").write_text(text)
    result = site.run("prepare", instance=dg.DagsterInstance.ephemeral())
    assert not result.success
    failed = [event for event in result.all_events if event.is_step_failure]
    told = {event.step_key: event.step_failure_data.user_failure_data.description for event in failed}
    assert "these keys may not write here (AccessDenied)" in told["training_features"]
    assert list(server.connect("others").list()) == []
