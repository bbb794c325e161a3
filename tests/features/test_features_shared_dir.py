"""A shared folder by content keys: whole files or none, one winner among writers, never outside, and stores of before."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.features import sample_folder
from draftworks.features.contracts import SampleRef
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.sample_folder import seal
from draftworks.storage.identity import canonical_json


def put(store: KeyedSharedDirStore, index: int = 1) -> SampleRef:
    ref = toy_ref(index)
    return store.put(ref, toy_tensors(ref))


def files_of(root: Path) -> list[Path]:
    return sorted((root / "samples").glob("*/*"))


def read(store: KeyedSharedDirStore, ref: SampleRef) -> None:
    tensors, handle = store.get(ref)
    assert all(torch.equal(tensor, toy_tensors(ref)[name]) for name, tensor in tensors.items())
    store.release(handle)


def test_a_feature_is_a_file_by_its_key_in_the_form_of_safetensors(tmp_path: Path):
    ref = put(KeyedSharedDirStore(tmp_path))
    names = {sample_folder.sample_key(key) + ".safetensors" for key in ref.feature_keys.values()}
    assert {path.name for path in files_of(tmp_path)} == names
    assert list((tmp_path / "staging").iterdir()) == []


def test_writers_of_one_key_end_with_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All have looked before any has published."""
    together, find = threading.Barrier(4), sample_folder.SampleFolder.find
    monkeypatch.setattr(sample_folder.SampleFolder, "find", lambda self, key: (find(self, key), together.wait())[0])
    stores = [KeyedSharedDirStore(tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=put, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(files_of(tmp_path)) == 2
    read(stores[0], put(stores[1]))


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS repeats a request: the second one finds the name that the first one made."""
    link = os.link

    def twice(source, target):
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", twice)
    store = KeyedSharedDirStore(tmp_path)
    read(store, put(store))


def test_a_refusing_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = KeyedSharedDirStore(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftworks.features.keyed_shared_dir.fsync", refuse)
    with pytest.raises(StoreError, match="cannot be written to .*No space left on device"):
        put(store)
    assert files_of(tmp_path) == list((tmp_path / "staging").iterdir()) == []


def test_damage_is_named_with_the_sample_it_is_of(tmp_path: Path):
    store = KeyedSharedDirStore(tmp_path)
    ref = put(store)
    damaged = files_of(tmp_path)[0]
    content = damaged.read_bytes()
    for altered, reason in (
        (content[:-4], "is truncated"),
        (content[:-1] + bytes([content[-1] ^ 1]), "is altered"),
        (content[:40] + bytes([content[40] ^ 1]) + content[41:], "."),
    ):
        damaged.write_bytes(altered)
        with pytest.raises(StoreError, match=rf"sample s1, feature .*{reason}.* remove it and capture again"):
            store.get(ref)
    damaged.write_bytes(files_of(tmp_path)[1].read_bytes())
    with pytest.raises(StoreError, match="it was renamed"):
        store.get(ref)
    damaged.unlink()
    assert len(store.find_missing(ref.feature_keys.values())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda identity: "{", "is truncated or altered"),
        (lambda identity: json.dumps({**identity, "schema": "other.3"}), "has schema 'other.3', expected"),
        (lambda identity: json.dumps({**identity, "store_id": "x"}), "the seal does not match"),
        (
            lambda identity: json.dumps({**identity, "sealed_by": "hmac-sha256"}),
            "a shared secret are not read any more",
        ),
    ],
)
def test_a_folder_that_is_no_such_store_is_a_clear_error(tmp_path: Path, change, message: str):
    KeyedSharedDirStore(tmp_path)
    path = tmp_path / "store.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(StoreError, match=message):
        KeyedSharedDirStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened as a shared feature store"):
        KeyedSharedDirStore(tmp_path / "file")


@given(st.text())
def test_hostile_keys_stay_inside_and_apart(key: str):
    name = sample_folder.sample_key(key)
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
    assert name != sample_folder.sample_key(key + "x")


@pytest.fixture
def before(tmp_path: Path) -> KeyedSharedDirStore:
    """A store as 0.1.0 wrote it: files with generations, one of them superseded and left behind."""
    put(KeyedSharedDirStore(tmp_path))
    for path in files_of(tmp_path):
        content = path.read_bytes()
        path.rename(path.with_name(f"{path.stem}.g1700000000000000.safetensors"))
        path.with_name(f"{path.stem}.g1600000000000000.safetensors").write_bytes(content[:-8])
    identity = json.loads((tmp_path / "store.json").read_text())
    identity = {**identity, "schema": "draftworks.shared-dir-store.1"}
    del identity["seal"]
    (tmp_path / "store.json").write_text(json.dumps({**identity, "seal": seal(canonical_json(identity).encode())}))
    return KeyedSharedDirStore(tmp_path)


def test_a_store_of_before_is_read_added_to_and_freed(before: KeyedSharedDirStore, tmp_path: Path):
    ref = toy_ref(1)
    keys = list(ref.feature_keys.values())
    assert before.find_missing(keys) == []
    read(before, put(before))
    assert len(files_of(tmp_path)) == 4, "what is there is not stored again"
    put(before, 2)
    assert before.health()["samples"] == 4
    assert (
        before.find_missing([*keys, *toy_ref(2).feature_keys.values(), *(f"other{n}" for n in range(1000))])[0]
        == "other0"
    )
    assert before.free(keys[:1]) > 0
    assert before.find_missing(keys) == keys[:1]
    assert before.free(keys) > 0
    assert before.find_missing(keys) == keys
    assert len(files_of(tmp_path)) == 2


def test_a_store_of_before_is_pruned(before: KeyedSharedDirStore, tmp_path: Path):
    unused = before.find_unused([])
    assert len(unused) == 2
    assert before.remove_files(unused) > 0
    assert files_of(tmp_path) == []
