"""Only whole checkpoints are seen, damage is named by file, and names that are no names are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_toys import contents, save_steps
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import list_files
from draftworks.storage.identity import digest
from draftworks.training.checkpoint_files import (
    RECORD,
    CheckpointFolder,
    CheckpointRecord,
    is_complete,
    read_record,
    verify,
    write_record,
)
from draftworks.training.checkpoint_manager import CheckpointManager

FILES = ("model.safetensors", "rng/rank0.safetensors", "history.json", "optimizer/*.safetensors")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("pristine")
    save_steps(CheckpointManager(folder, "run"), 1, 2)
    return folder


@pytest.fixture
def output(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "output")


def the_file(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


BAD_NAMES = [
    "",
    ".",
    "..",
    "../run",
    "a/b",
    "/run",
    "a\\b",
    "*",
    "run*",
    "ru?",
    "[r]un",
    "Run",
    "run 1",
    "run\n",
    "x" * 64,
]


@pytest.mark.parametrize("run_id", BAD_NAMES)
def test_a_run_id_that_is_no_name_is_refused_and_nothing_is_deleted(output: Path, run_id: str):
    before = contents(output.parent)
    with pytest.raises(ConfigError, match="run_id: .* is not a name: lower-case letters"):
        CheckpointManager(output / "inner", run_id, max_checkpoints=1)
    assert contents(output.parent) == before


@given(run_id=st.text(alphabet="a1-._/*[]?~\\ ", max_size=8), step=st.integers(0, 10**9))
def test_every_name_that_is_accepted_stays_in_the_folder_and_is_read_back(run_id: str, step: int):
    try:
        folder = CheckpointFolder(Path("/output"), run_id)
    except ConfigError:
        return
    for path in (folder.final(step), folder.staging(step), folder.latest_pointer, folder.best_pointer):
        assert path.resolve().parent == Path("/output")


def test_steps_are_numbers_not_text(tmp_path: Path, pristine: Path):
    folder = CheckpointFolder(tmp_path, "run")
    for step in (10, 9, 100):
        shutil.copytree(pristine / "run-step1", folder.final(step))
    assert folder.steps() == [9, 10, 100]
    assert CheckpointFolder(tmp_path / "missing", "run").steps() == []


def rewritten(change: Callable[[dict[str, Any]], object], sealed: bool = True) -> Callable[[Path], object]:
    """The record says something else, and means it where `sealed`."""

    def rewrite(folder: Path) -> None:
        values = json.loads((folder / RECORD).read_text())
        recorded = values.pop("digest")
        change(values)
        (folder / RECORD).write_text(json.dumps({**values, "digest": digest(values) if sealed else recorded}))

    return rewrite


DAMAGE = {
    "no record": (lambda f: (f / RECORD).unlink(), f"{RECORD} is missing"),
    "empty record": (lambda f: (f / RECORD).write_text(""), f"{RECORD}: not a checkpoint record"),
    "cut-off record": (lambda f: (f / RECORD).write_text('{"run_id"'), f"{RECORD}: not a checkpoint record"),
    "record of nothing": (lambda f: (f / RECORD).write_text("{}"), f"{RECORD}: not a checkpoint record"),
    "record is a list": (lambda f: (f / RECORD).write_text("[]"), f"{RECORD}: not a checkpoint record"),
    "record lacks a field": (rewritten(lambda values: values.pop("state")), f"{RECORD}: not a checkpoint record"),
    "record is altered": (rewritten(lambda v: v.update(step=3), sealed=False), f"{RECORD}: altered"),
    "record lacks its digest": (lambda f: _without_digest(f / RECORD), f"{RECORD}: not a checkpoint record"),
    "other schema": (rewritten(lambda v: v.update(schema_version=99)), f"{RECORD}: schema 99, expected 1"),
    "missing file": (lambda f: (f / "history.json").unlink(), "history.json: cannot be read: No such file"),
    "file is a folder": (
        lambda f: _folder_instead(f / "history.json"),
        "history.json: cannot be read: .*found a folder",
    ),
    "longer file": (lambda f: _append(f / "history.json"), "history.json: truncated or altered: expected .* bytes"),
}


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _without_digest(path: Path) -> None:
    values = json.loads(path.read_text())
    del values["digest"]
    path.write_text(json.dumps(values))


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_an_incomplete_checkpoint_is_invisible_and_says_which_file_it_is(output: Path, damage, said: str):
    damage(output / "run-step2")
    assert not is_complete(output / "run-step2")
    assert CheckpointFolder(output, "run").steps() == [1]
    assert CheckpointManager(output, "run").latest_dir() == output / "run-step1"
    with pytest.raises(StoreError, match=f"run-step2.*{said}"):
        read_record(output / "run-step2")


@pytest.mark.parametrize("pattern", FILES)
@pytest.mark.parametrize("length", [0, -1])
def test_a_truncated_file_is_named_with_both_sizes(output: Path, pattern: str, length: int):
    path = the_file(output / "run-step2", pattern)
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with pytest.raises(StoreError) as error:
        read_record(output / "run-step2")
    assert str(error.value).startswith(f"{path}: truncated")
    assert f"expected {len(whole)} bytes, found {len(whole[:length])} bytes" in str(error.value)
    assert CheckpointFolder(output, "run").steps() == [1]


@pytest.mark.parametrize("pattern", FILES)
def test_a_flipped_byte_is_refused_by_the_name_of_its_file(output: Path, pattern: str):
    folder = output / "run-step2"
    path, record = the_file(folder, pattern), read_record(folder)
    whole = path.read_bytes()

    @given(place=st.integers(0, len(whole) - 1), flip=st.integers(1, 255))
    def refused(place: int, flip: int) -> None:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        assert read_record(folder) == record
        with pytest.raises(StoreError, match="altered: expected digest .*found .* Remove") as error:
            verify(folder, record, record.files)
        assert str(error.value).startswith(f"{path}: ")

    refused()
    path.write_bytes(whole)
    verify(folder, record, record.files)


def test_a_flipped_byte_in_the_record_is_refused_unless_it_means_the_same(output: Path):
    folder = output / "run-step2"
    whole, record = (folder / RECORD).read_bytes(), read_record(folder)

    @given(place=st.integers(0, len(whole) - 1), flip=st.integers(1, 255))
    def refused(place: int, flip: int) -> None:
        (folder / RECORD).write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        if is_complete(folder):
            assert read_record(folder) == record
            return
        with pytest.raises(StoreError, match=f"^{folder / RECORD}: "):
            read_record(folder)

    refused()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(), JSON, max_size=4))
def test_any_state_that_is_json_is_sealed_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
):
    folder = tmp_path_factory.mktemp("sealed")
    write_record(folder, "run", 7, 2, 0.25, state, {})
    assert read_record(folder) == CheckpointRecord("run", 7, 2, 0.25, state, {})


def test_the_record_lists_every_other_file(pristine: Path):
    folder = pristine / "run-step1"
    assert [*read_record(folder).files, RECORD] == sorted(list_files(folder), key=lambda name: (name == RECORD, name))


def test_a_path_that_is_no_checkpoint_says_what_it_is(output: Path):
    found = {output / "nowhere": "found nothing", output / "run-latest.json": "found a file"}
    for path, said in found.items():
        with pytest.raises(StoreError, match=f"{path}: expected the folder of a checkpoint, {said}"):
            read_record(path)
    with pytest.raises(StoreError, match="It holds the checkpoints run-step1, run-step2: name one of them"):
        read_record(output)


def test_the_hint_names_only_whole_checkpoints(output: Path):
    (output / "run-step1" / RECORD).unlink()
    with pytest.raises(StoreError, match="It holds the checkpoints run-step2: name"):
        read_record(output)
    (output / "run-step2" / RECORD).unlink()
    with pytest.raises(StoreError, match=f"{RECORD} is missing$"):
        read_record(output)


def test_the_hint_looks_no_deeper_than_the_folder(output: Path):
    """A mistyped path may be that of a home folder, or lead in circles."""
    for name in ("here", "there"):
        (output / "deep" / name).mkdir(parents=True)
        for _ in range(2):
            (output / "deep" / name / f"back{_}").symlink_to(output, target_is_directory=True)
    with pytest.raises(StoreError, match=f"{RECORD} is missing$"):
        read_record(output / "deep")


def test_an_unwritten_checkpoint_is_neither_seen_nor_swept_by_a_reader(output: Path):
    (output / "run-step2").rename(output / "run-step2.partial")
    before = contents(output)
    manager = CheckpointManager(output, "run")
    assert (manager.steps(), manager.best) == ([1], None)
    assert manager.latest_dir() == output / "run-step1"
    assert contents(output) == before


def test_removing_never_shows_a_part(output: Path, monkeypatch):
    folder, seen, remove = CheckpointFolder(output, "run"), [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **more: (seen.append(folder.steps()), remove(*args, **more)))
    folder.remove(2)
    assert seen[-1] == folder.steps() == [1]
    assert not folder.final(2).exists()
