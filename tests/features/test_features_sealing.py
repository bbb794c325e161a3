"""What was altered, renamed, or sealed by somebody else is refused by name."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from shared_dir_toys import file_of, generation, put

from draftworks.errors import ConfigError, StoreError
from draftworks.features.sample_folder import sample_key
from draftworks.features.sealing import AuthPolicy
from draftworks.features.shared_dir_store import SharedDirFeatureStore

SECRET, OTHER = b"correct horse battery staple", b"incorrect horse battery staple"


@pytest.mark.parametrize("policy", [AuthPolicy(), AuthPolicy(SECRET)], ids=["plain", "secret"])
def test_any_altered_byte_and_any_length_is_an_error_that_names_the_file(tmp_path: Path, policy: AuthPolicy):
    store = SharedDirFeatureStore(tmp_path, retain_on_release=True, policy=policy)
    ref = put(store, 1)
    path = file_of(tmp_path)
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:length] for length in (0, 5, 8, 40, len(whole) - 1)]
    for content in [*flipped, *cut, whole + b"\0", b"\xff" * 8 + whole[8:]]:
        path.write_bytes(content)
        with pytest.raises(StoreError, match=f"sample s1: .*{path.name}"):
            store.get(ref)
    path.write_bytes(whole)
    assert store.get(ref)


@pytest.mark.parametrize(("sample_id", "later"), [("s2", 0), ("s1", 1)], ids=["sample", "generation"])
def test_a_renamed_file_is_refused(tmp_path: Path, sample_id: str, later: int):
    store = SharedDirFeatureStore(tmp_path)
    ref = put(store, 1).select(("last",))
    file = f"{sample_key(sample_id)}.g{generation(ref) + later}.safetensors"
    path = tmp_path / "samples" / file[:3] / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file_of(tmp_path).read_bytes())
    with pytest.raises(StoreError, match=f"{file} holds sample 's1' of generation {generation(ref)}.*renamed"):
        store.get(replace(ref, sample_id=sample_id, feature_keys={"last": f"{file}/last"}))


def test_the_secret_opens_the_store_and_nothing_else_does(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    store = SharedDirFeatureStore(tmp_path, policy=AuthPolicy(SECRET))
    ref = put(store, 1)
    assert SharedDirFeatureStore(tmp_path, policy=AuthPolicy(SECRET)).get(ref)
    with pytest.raises(StoreError, match="store.json is refused: .*none was given: open the store with `AuthPolicy"):
        SharedDirFeatureStore(tmp_path)
    with pytest.raises(StoreError, match="store.json is refused: .*another secret") as refused:
        SharedDirFeatureStore(tmp_path, policy=AuthPolicy(OTHER))
    shown = [repr(store), repr(AuthPolicy(SECRET)), json.dumps(store.health()), str(refused.value), caplog.text]
    shown += [path.read_bytes().decode("latin1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(text in part for part in shown for text in (SECRET.decode(), OTHER.decode(), SECRET.hex()))


@pytest.mark.parametrize(
    ("forger", "reason"),
    [
        (AuthPolicy(), "not sealed with the shared secret that was given"),
        (AuthPolicy(OTHER), "sealed with another secret"),
    ],
)
def test_a_file_without_our_seal_is_refused(tmp_path: Path, forger: AuthPolicy, reason: str):
    store = SharedDirFeatureStore(tmp_path / "ours", policy=AuthPolicy(SECRET))
    ref = put(store, 1)
    foreign = SharedDirFeatureStore(tmp_path / "theirs", policy=forger)
    put(foreign, 1)
    file_of(tmp_path / "ours").write_bytes(file_of(tmp_path / "theirs").read_bytes())
    with pytest.raises(StoreError, match=f"sample s1: .*{file_of(tmp_path / 'ours').name} is refused: .*{reason}"):
        store.get(ref)


def test_a_store_without_a_secret_is_not_opened_with_one(tmp_path: Path):
    SharedDirFeatureStore(tmp_path)
    with pytest.raises(StoreError, match="not sealed with the shared secret that was given"):
        SharedDirFeatureStore(tmp_path, policy=AuthPolicy(SECRET))
    with pytest.raises(ConfigError, match="5 bytes, expected at least 16"):
        AuthPolicy(b"guess")
