"""The deployment decides where features are stored; run files pass that on to the programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftworks.config.features import BucketAccess, ObjectFeaturesSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry
from resources.workspace import Workspace


def deployment(folder: Path, text: str) -> Registry:
    (folder / "deployment.yaml").write_text(text)
    return Registry(folder)


def workspace(folder: Path, text: str) -> Workspace:
    return Workspace(registry_root=str(deployment(folder, text).root))


def test_features_are_kept_under_var_unless_the_deployment_says_otherwise(tmp_path: Path, tiny_target: TargetFiles):
    var = (tmp_path / "../var").resolve()
    assert workspace(tmp_path, "{}").locate_feature_store(tiny_target) == StoreSpec(
        root=var / "feature_store" / tiny_target.digest
    )
    local = workspace(tmp_path, "features: {root: here}").locate_feature_store(tiny_target)
    assert local == StoreSpec(kind="local", root=tmp_path / "here" / tiny_target.digest)
    shared = workspace(tmp_path, "features: {kind: shared_dir, root: /mnt/features}").locate_feature_store(tiny_target)
    assert shared == StoreSpec(kind="shared_dir", root=Path("/mnt/features") / tiny_target.digest)


def test_features_in_object_storage_are_reached_as_their_bucket_is(tmp_path: Path, tiny_target: TargetFiles):
    text = """
        features: {kind: s3, url: "s3://bucket/some/place/", cache: /disk/cache, cache_gb: 5}
        object_storage: {endpoint: "http://a:1", buckets: {bucket: {endpoint: "http://b:2", access_key_env: MINE}}}
    """
    store = workspace(tmp_path, text).locate_feature_store(tiny_target)
    assert store.objects == ObjectFeaturesSpec(
        url=f"s3://bucket/some/place/{tiny_target.digest}",
        access=BucketAccess(endpoint="http://b:2", access_key_env="MINE"),
        cache=Path("/disk/cache"),
        cache_gb=5,
    )
    assert store.root == (tmp_path / "../var").resolve() / "object_store_notes" / tiny_target.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "features: {kind: shared_dir}",
            "deployment.yaml: features: kind shared_dir needs a root: the existing folder",
        ),
        (
            "features: {kind: mooncake}",
            "deployment.yaml: features.kind: expected one of local, shared_dir, s3, found 'mooncake'",
        ),
        ("features: {kind: s3}", "deployment.yaml: features: kind s3 needs a url such as s3://bucket/prefix"),
        (
            "features: {url: 's3://bucket/x'}",
            "deployment.yaml: features: kind s3 needs a url .* and no other kind has one",
        ),
        ("features: {kind: s3, url: 's3://key:hidden@b/x'}", "features: a URL of object storage must not contain keys"),
        ("publish: {url: /folder}", "deployment.yaml: publish.url: expected a place in object storage"),
        ("features: {rot: x}", r"deployment.yaml: unknown key features.rot; did you mean root\?"),
    ],
)
def test_a_bad_store_is_refused_with_file_key_and_reason(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        deployment(tmp_path, text).load_deployment()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("feats", StoreSpec(root="feats")),
        ({"kind": "shared_dir", "root": "feats"}, StoreSpec(kind="shared_dir", root="feats")),
    ],
)
def test_the_store_of_a_run_file_is_a_place_or_a_kind_and_a_place(
    tmp_path: Path, tiny_target: TargetFiles, written, meant
):
    run = CaptureRun(
        out=tmp_path, target=tiny_target, tokens=tmp_path, taps=[2], capture=CaptureSpec(), store="elsewhere"
    )
    path = run.save(tmp_path / "run.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "store": written}))
    loaded = CaptureRun.load(path).store
    assert loaded == meant.model_copy(update={"root": tmp_path / "feats"})
    assert CaptureRun.load(CaptureRun.load(path).save(tmp_path / "again.yaml")).store == loaded
