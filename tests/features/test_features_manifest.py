"""Feature sets: read equals written, and every kind of damage has its message."""

from __future__ import annotations

from pathlib import Path

import pytest
from features_toys import filled_store

from draftworks.errors import StoreError
from draftworks.features.manifest import MANIFEST, REFS, FeatureSetIdentity, read_feature_set, write_feature_set


@pytest.fixture
def written(tmp_path: Path) -> Path:
    store, refs = filled_store(tmp_path / "store", 4)
    write_feature_set(tmp_path / "set", refs, FeatureSetIdentity(target="abc"), ("hf2", "last"), store.uri)
    return tmp_path / "set"


def test_read_equals_written(tmp_path: Path):
    store, refs = filled_store(tmp_path / "store", 4)
    manifest = write_feature_set(tmp_path / "set", refs, FeatureSetIdentity(target="abc"), ("hf2", "last"), store.uri)
    assert read_feature_set(tmp_path / "set") == manifest
    assert manifest.samples == 4
    assert manifest.tokens == sum(ref.num_tokens for ref in refs)
    assert manifest.nbytes == sum(ref.estimated_bytes for ref in refs)


def test_data_version_is_of_the_keys_alone(tmp_path: Path):
    store, refs = filled_store(tmp_path / "store", 4)
    one = write_feature_set(tmp_path / "one", refs, FeatureSetIdentity(target="abc"), ("hf2", "last"), store.uri)
    other = write_feature_set(
        tmp_path / "other", refs[::-1], FeatureSetIdentity(), ("hf2", "last"), "file:///elsewhere"
    )
    fewer = write_feature_set(tmp_path / "fewer", refs[1:], FeatureSetIdentity(), ("hf2", "last"), store.uri)
    assert one.data_version == other.data_version != fewer.data_version


def test_the_version_of_some_streams_is_the_same_whatever_is_captured_beside_them(tmp_path: Path):
    store, refs = filled_store(tmp_path / "store", 4)
    both = write_feature_set(tmp_path / "both", refs, FeatureSetIdentity(), ("hf2", "last"), store.uri)
    alone = write_feature_set(
        tmp_path / "alone", [ref.select(("hf2",)) for ref in refs], FeatureSetIdentity(), ("hf2",), store.uri
    )
    fewer = write_feature_set(tmp_path / "fewer", refs[1:], FeatureSetIdentity(), ("hf2", "last"), store.uri)
    assert both.data_version != alone.data_version
    assert both.version_of(["hf2"]) == alone.version_of(["hf2"])
    assert len({both.version_of(names) for names in (["hf2"], ["last"], ["hf2", "last"])}) == 3
    assert fewer.version_of(["hf2"]) != both.version_of(["hf2"])
    with pytest.raises(KeyError, match="last"):
        alone.version_of(["last"])


def test_missing_set_says_so(tmp_path: Path):
    with pytest.raises(StoreError, match="no feature set in .*manifest.json is missing"):
        read_feature_set(tmp_path)


def test_truncated_refs_are_counted(written: Path):
    lines = (written / REFS).read_text().splitlines(keepends=True)
    (written / REFS).write_text("".join(lines[:-1]))
    with pytest.raises(StoreError, match="truncated: expected 4 lines, found 3"):
        read_feature_set(written)


def test_altered_refs_are_noticed(written: Path):
    (written / REFS).write_text((written / REFS).read_text().replace('"s1"', '"sX"', 1))
    with pytest.raises(StoreError, match=r"refs.jsonl is altered: expected digest"):
        read_feature_set(written)


def test_truncated_manifest_is_noticed(written: Path):
    (written / MANIFEST).write_text((written / MANIFEST).read_text()[:-20])
    with pytest.raises(StoreError, match=r"manifest.json cannot be read"):
        read_feature_set(written)


def test_other_schema_is_refused(written: Path):
    (written / MANIFEST).write_text((written / MANIFEST).read_text().replace("features.3", "features.9"))
    with pytest.raises(StoreError, match=r"expected 'draftworks.features.3'"):
        read_feature_set(written)
