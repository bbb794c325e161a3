"""Identities: injective, stable, and converted between conventions without loss."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.storage.identity import (
    EngineIdentity,
    FeatureIdentity,
    FileDigests,
    LastHidden,
    LayerTap,
    canonical_json,
    digest,
    file_digest,
    token_digest,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_a_round_trip(value):
    assert json.loads(canonical_json(value)) == value


@given(st.lists(st.text(max_size=6), max_size=4), st.lists(st.text(max_size=6), max_size=4))
def test_different_field_lists_have_different_digests_whatever_separators_they_hold(a, b):
    assert (digest(a) == digest(b)) == (a == b)


@given(st.dictionaries(st.text(max_size=4), st.integers(), max_size=5))
def test_digest_does_not_depend_on_key_order(mapping):
    assert digest(mapping) == digest(dict(reversed(mapping.items())))


@given(st.integers(0, 200))
def test_layer_tap_conversions_are_round_trips(index):
    tap = LayerTap(index)
    assert LayerTap.from_layer_output(tap.to_layer_output()) == tap
    assert LayerTap.from_vllm(tap.to_vllm()) == tap
    assert tap.to_vllm() - tap.to_layer_output() == 1


def test_conventions_of_the_field_name_the_same_three_streams():
    layers = 36
    ours = [2, layers // 2, layers - 3]
    assert [LayerTap.from_layer_output(i).hf_index for i in (1, layers // 2 - 1, layers - 4)] == ours
    assert [LayerTap.from_vllm(i).hf_index for i in ours] == ours


def test_a_negative_tap_is_refused():
    with pytest.raises(ValueError, match="-1"):
        LayerTap(-1)


BASE = FeatureIdentity("target", EngineIdentity("hf", 1), "float32")


def test_every_field_of_a_feature_identity_changes_the_key():
    tokens = token_digest([1, 2, 3])
    keys = {
        BASE.key(tokens, LayerTap(2)),
        BASE.key(token_digest([1, 2, 4]), LayerTap(2)),
        BASE.key(tokens, LayerTap(3)),
        BASE.key(tokens, LastHidden(True)),
        BASE.key(tokens, LastHidden(False)),
        FeatureIdentity("other", BASE.engine, BASE.dtype).key(tokens, LayerTap(2)),
        FeatureIdentity("target", EngineIdentity("hf", 2), BASE.dtype).key(tokens, LayerTap(2)),
        FeatureIdentity("target", EngineIdentity("sglang", 1), BASE.dtype).key(tokens, LayerTap(2)),
        FeatureIdentity("target", BASE.engine, "bfloat16").key(tokens, LayerTap(2)),
    }
    assert len(keys) == 9


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_token_digest_is_injective_on_token_lists(a, b):
    assert (token_digest(a) == token_digest(b)) == (a == b)


def test_file_digest_follows_content_and_is_remembered(tmp_path: Path):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"one")
    cache = tmp_path / "cache.json"
    first = FileDigests(cache).of_file(weights)
    assert FileDigests(cache).of_file(weights) == first
    weights.write_bytes(b"two!")
    assert FileDigests(cache).of_file(weights) != first


def test_a_corrupt_digest_cache_is_ignored(tmp_path: Path):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"one")
    cache = tmp_path / "cache.json"
    cache.write_text("{not json")
    assert FileDigests(cache).of_file(weights) == FileDigests().of_file(weights)


def _replaced_by_copy_with_its_times(weights: Path, other: Path) -> None:
    subprocess.run(["cp", "-p", other, weights], check=True)


def _replaced_by_install(weights: Path, other: Path) -> None:
    subprocess.run(["install", "-p", other, weights], check=True)


def _replaced_by_an_archive(weights: Path, other: Path) -> None:
    packed = other.with_suffix(".tar")
    subprocess.run(["tar", "-C", other.parent, "-cf", packed, other.name], check=True)
    subprocess.run(["tar", "-C", weights.parent, "-xf", packed], check=True)


def _overwritten_with_its_time_put_back(weights: Path, other: Path) -> None:
    weights.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "replace_file",
    [
        _replaced_by_copy_with_its_times,
        _replaced_by_install,
        _replaced_by_an_archive,
        _overwritten_with_its_time_put_back,
    ],
)
def test_a_file_in_the_place_of_another_is_noticed_however_it_came_there(tmp_path: Path, replace_file):
    """Same name, size and modification time, and often the same inode."""
    weights, other = tmp_path / "weights.bin", tmp_path / "new" / "weights.bin"
    other.parent.mkdir()
    for path, content in ((weights, b"one"), (other, b"two")):
        path.write_bytes(content)
        os.utime(path, (1e9, 1e9))
    cache = tmp_path / "cache.json"
    before = FileDigests(cache).of_file(weights)
    time.sleep(0.02)  # a tick of the clock that stamps changes
    replace_file(weights, other)
    os.utime(weights, (1e9, 1e9))
    assert weights.stat().st_mtime == 1e9
    assert FileDigests(cache).of_file(weights) == FileDigests().of_file(other) != before


def test_a_digest_that_was_remembered_without_the_time_of_change_is_read_again(tmp_path: Path):
    weights, cache = tmp_path / "weights.bin", tmp_path / "cache.json"
    weights.write_bytes(b"one")
    stat = weights.stat()
    stamp = canonical_json([str(weights.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    cache.write_text(json.dumps({stamp: "of an older file"}))
    assert FileDigests(cache).of_file(weights) == FileDigests().of_file(weights)


def test_a_file_that_is_written_while_it_is_read_is_not_remembered(tmp_path: Path, monkeypatch):
    weights, cache = tmp_path / "weights.bin", tmp_path / "cache.json"
    weights.write_bytes(b"one")

    def overtaken(path: Path) -> str:
        found = file_digest(path)
        path.write_bytes(b"longer")
        return found

    monkeypatch.setattr("draftworks.storage.identity.file_digest", overtaken)
    FileDigests(cache).of_file(weights)
    monkeypatch.undo()
    assert FileDigests(cache).of_file(weights) == file_digest(weights)


def test_digests_that_cannot_be_remembered_are_known_all_the_same(tmp_path: Path, caplog):
    """On another machine, where the folder is not."""
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"one")
    assert FileDigests(weights / "no" / "cache.json").of_file(weights) == file_digest(weights)
    assert "cannot be cached" in caplog.text
