"""A run file's store is opened by its kind, at its place; what cannot be opened or written to is said at once."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch
from features_toys import toy_ref, toy_tensors

import draftworks.features.open_store as open_store_module
from draftworks.config.run_files import StoreSpec
from draftworks.errors import StoreError
from draftworks.features.open_store import open_store, open_store_to_write

KINDS = ["local", "shared_dir"]


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSpec:
    return StoreSpec(kind=request.param, root=tmp_path / "store")


def test_what_is_put_is_found_by_whoever_opens_the_store_next(spec: StoreSpec):
    ref, store = toy_ref(1), open_store_to_write(spec)
    stored = store.put(ref, toy_tensors(ref))
    store.close()
    assert stored.feature_keys == ref.feature_keys
    again = open_store(spec)
    tensors, handle = again.get(stored)
    again.release(handle)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in toy_tensors(ref).items()
    }
    assert again.uri == stored.feature_store_uri


def test_missing_keys_are_those_that_nobody_has_put(spec: StoreSpec):
    store = open_store(spec)
    for index in range(3):
        store.put(toy_ref(index), toy_tensors(toy_ref(index)))
    store.flush()
    wanted = [key for index in (4, 1, 3) for key in toy_ref(index).feature_keys.values()]
    assert open_store(spec).find_missing(wanted) == wanted[:2] + wanted[4:]


def test_a_feature_that_is_there_is_not_stored_again(spec: StoreSpec):
    store = open_store(spec)
    ref = toy_ref(1)
    for tensors in (toy_tensors(ref), {name: torch.zeros(3, 4) for name in ref.feature_keys}):
        store.put(ref, tensors)
    store.flush()
    assert torch.equal(store.get(ref)[0]["last"], toy_tensors(ref)["last"])


def test_features_come_one_by_one_as_strategies_ask_for_them(spec: StoreSpec):
    store, ref = open_store(spec), toy_ref(1)
    for name, tensor in toy_tensors(ref).items():
        store.put(ref, {name: tensor})
    store.flush()
    assert list(open_store(spec).get(ref)[0]) == ["hf2", "last"]


def test_an_absent_feature_is_named_with_the_way_to_get_it(spec: StoreSpec):
    ref = toy_ref(1)
    with pytest.raises(StoreError, match=f"sample s1, feature hf2: key {ref.feature_keys['hf2']} is not in .* Capture"):
        open_store(spec).get(ref)


def test_features_of_another_shape_than_their_reference_says_are_refused(spec: StoreSpec):
    store, ref = open_store(spec), toy_ref(1)
    stored = store.put(ref, toy_tensors(ref))
    other = open_store(spec).put(toy_ref(1), {name: torch.zeros(9, 4) for name in ref.feature_keys})
    assert store.get(stored)
    with pytest.raises(StoreError, match=r"sample s1, feature hf2: .*expected shape \(9, 4\)"):
        store.get(other)


def test_a_place_that_is_a_file_is_refused(spec: StoreSpec):
    spec.root.write_text("x")
    with pytest.raises(StoreError, match=re.escape(str(spec.root))):
        open_store(spec)


def test_a_shared_folder_that_is_not_mounted_is_not_made_up(tmp_path: Path):
    with pytest.raises(StoreError, match=r"mnt: expected the shared folder, found none. Mount it"):
        open_store(StoreSpec(kind="shared_dir", root=tmp_path / "mnt" / "target"))
    assert not (tmp_path / "mnt").exists()


def test_a_store_that_cannot_be_written_to_is_found_out_before_anything_is_put(
    spec: StoreSpec, monkeypatch: pytest.MonkeyPatch
):
    open_store(spec).close()

    def refuse(**where: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(where["dir"]))

    monkeypatch.setattr(open_store_module.tempfile, "TemporaryFile", refuse)
    with pytest.raises(StoreError, match=r"may write to, found: .*denied.*features.root in registry/deployment.yaml"):
        open_store_to_write(spec)
    assert open_store(spec)
