"""A run file's store is opened by its kind, at its place; what cannot be opened or written to is said at once."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
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


def test_an_absent_feature_is_named_with_the_way_to_get_it(spec: StoreSpec):
    ref = toy_ref(1)
    with pytest.raises(StoreError, match=f"sample s1, feature hf2: key {ref.feature_keys['hf2']} is not in .* Capture"):
        open_store(spec).get(ref)


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
