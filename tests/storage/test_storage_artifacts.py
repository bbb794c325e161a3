"""Results are complete or absent, made once, resumable, and damage is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import find_now, wait_until

from draftworks.errors import StoreError
from draftworks.storage import identity
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.file_lock import try_lock

IDENTITY = {"a": 1}


def writing(text: str, calls: list[str] | None = None):
    def build(out: Path) -> BuildResult:
        if calls is not None:
            calls.append(text)
        (out / "data.txt").write_text(text)
        return BuildResult(data_version=text, summary={"length": len(text)})

    return build


def test_the_same_identity_is_built_once(tmp_path: Path):
    store, calls = ArtifactStore(tmp_path), []
    first = store.obtain("thing", "tiny", IDENTITY, writing("x", calls))
    second = store.obtain("thing", "tiny", IDENTITY, writing("y", calls))
    assert (first.hit, second.hit) == (False, True)
    assert calls == ["x"]
    assert second.data_version == "x"
    assert second.summary == {"length": 1}


def test_current_follows_the_identity_asked_for_last(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    store.obtain("thing", "tiny", {"a": 1}, writing("one"))
    store.obtain("thing", "tiny", {"a": 2}, writing("two"))
    assert store.load_current("thing", "tiny").data_version == "two"
    store.obtain("thing", "tiny", {"a": 1}, writing("never"))
    assert store.load_current("thing", "tiny").data_version == "one"


def test_a_result_whose_identity_was_provisional_is_found_under_the_one_it_has(tmp_path: Path):
    store = ArtifactStore(tmp_path)

    def build(out: Path) -> BuildResult:
        (out / "data.txt").write_text("without two samples")
        return BuildResult("v", identity_changes={"a": 2})

    built = store.obtain("thing", "tiny", {"a": 1, "b": 1}, build)
    assert built.identity == {"a": 2, "b": 1}
    assert store.load_current("thing", "tiny").path == built.path
    assert store.obtain("thing", "tiny", {"a": 2, "b": 1}, writing("never")).hit
    assert not store.is_current("thing", "tiny", {"a": 1, "b": 1})
    assert "identity_changes" not in json.loads((built.path / "artifact.json").read_text())


def test_a_failed_build_publishes_nothing_and_the_next_continues_in_what_it_left(tmp_path: Path):
    store = ArtifactStore(tmp_path)

    def failing(out: Path) -> BuildResult:
        (out / "half.txt").write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        store.obtain("thing", "tiny", IDENTITY, failing)
    assert store.find("thing", "tiny") is None

    def continuing(out: Path) -> BuildResult:
        return BuildResult(data_version=(out / "half.txt").read_text())

    assert store.obtain("thing", "tiny", IDENTITY, continuing).data_version == "half"


def test_start_over_discards_what_is_there(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    store.obtain("thing", "tiny", IDENTITY, writing("old"))
    again = store.obtain("thing", "tiny", IDENTITY, writing("new"), start_over=True)
    assert (again.hit, again.data_version) == (False, "new")


def test_a_result_whose_outside_parts_are_gone_is_built_again(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    store.obtain("thing", "tiny", IDENTITY, writing("old"))
    again = store.obtain("thing", "tiny", IDENTITY, writing("new"), still_good=lambda artifact: False)
    assert (again.hit, again.data_version) == (False, "new")
    assert store.obtain("thing", "tiny", IDENTITY, writing("x"), still_good=lambda artifact: True).hit


def test_a_missing_result_says_what_to_materialize(tmp_path: Path):
    with pytest.raises(StoreError, match="thing of target tiny does not exist yet: materialize it first"):
        ArtifactStore(tmp_path).load_current("thing", "tiny")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}'])
def test_a_damaged_record_is_named(tmp_path: Path, content: str):
    store = ArtifactStore(tmp_path)
    artifact = store.obtain("thing", "tiny", IDENTITY, writing("x"))
    (artifact.path / "artifact.json").write_text(content)
    with pytest.raises(StoreError, match=str(artifact.path)):
        store.load_current("thing", "tiny")


def test_names_that_leave_the_root_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not a name"):
        ArtifactStore(tmp_path).find("thing", "../elsewhere")
    pointer = tmp_path / "thing" / "tiny" / "current.json"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"digest": "../../etc"}))
    with pytest.raises(StoreError, match="not a pointer to a result"):
        ArtifactStore(tmp_path).load_current("thing", "tiny")


@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: p.write_text("y"), lambda p: p.write_text("")])
def test_a_result_with_a_damaged_file_is_no_hit_and_is_built_again(tmp_path: Path, change):
    store = ArtifactStore(tmp_path)
    change(store.obtain("thing", "tiny", IDENTITY, writing("x")).path / "data.txt")
    again = store.obtain("thing", "tiny", IDENTITY, writing("x"))
    assert not again.hit
    assert again.find_damage() is None


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_while_a_result_is_replaced_leaves_the_old_or_the_new_one(tmp_path: Path, monkeypatch, renames: int):
    store = ArtifactStore(tmp_path)
    final = store.obtain("thing", "tiny", IDENTITY, writing("old")).path
    done: list[str] = []
    rename = os.replace

    def dying(source, destination):
        folder = Path(destination).name in (final.name, final.name + ".old")
        if folder and len(done) == renames:
            raise KeyboardInterrupt
        done.extend([str(destination)] if folder else [])
        rename(source, destination)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        store.obtain("thing", "tiny", IDENTITY, writing("new"), start_over=True)
    monkeypatch.undo()
    found = store.obtain("thing", "tiny", IDENTITY, writing("newest"))
    assert found.find_damage() is None
    assert found.data_version == ("old" if renames == 0 else "newest")


def test_a_folder_with_digests_of_its_own_is_neither_digested_nor_read_again(tmp_path: Path, monkeypatch):
    digested, open_file = [], identity.open_regular
    monkeypatch.setattr(identity, "open_regular", lambda path: digested.append(path.name) or open_file(path))

    def build(out: Path) -> BuildResult:
        (out / "checkpoints" / "step1").mkdir(parents=True)
        (out / "checkpoints" / "step1" / "large.bin").write_text("large")
        (out / "checkpoints.txt").write_text("of the same name, almost")
        return BuildResult("x", own_digests=("checkpoints",))

    store = ArtifactStore(tmp_path)
    built = store.obtain("thing", "tiny", IDENTITY, build)
    assert (built.path / "checkpoints" / "step1" / "large.bin").read_text() == "large"
    (built.path / "checkpoints" / "step1" / "large.bin").write_text("damage that its own digest finds")
    found = store.obtain("thing", "tiny", IDENTITY, build)
    assert found.hit
    assert built.files.keys() == found.files.keys() == {"checkpoints.txt"}
    assert digested == ["checkpoints.txt", "checkpoints.txt"]


def test_staging_files_of_dead_writers_are_not_published(tmp_path: Path):
    def leaving(out: Path) -> BuildResult:
        (out / ".data.txt.123.tmp").write_text("half")
        return writing("x")(out)

    artifact = ArtifactStore(tmp_path).obtain("thing", "tiny", IDENTITY, leaving)
    assert sorted(path.name for path in artifact.path.iterdir()) == ["artifact.json", "data.txt"]


def test_a_result_that_exists_is_found_while_another_is_being_built(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    store.obtain("thing", "tiny", {"other": 1}, writing("x"))
    process = started_build(tmp_path, 60)
    try:
        assert store.obtain("thing", "tiny", {"other": 1}, writing("y")).hit
    finally:
        process.kill()
        process.wait()


def test_all_results_are_listed_newest_first_without_what_is_damaged_or_unfinished(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    made = [store.obtain("thing", "tiny", {"a": number}, writing(str(number))) for number in range(4)]
    (made[1].path / "artifact.json").write_text("{")
    store.obtain("thing", "tiny", {"a": 0}, writing("0"))
    for ending in (".partial", ".old"):
        shutil.copytree(made[2].path, made[2].path.with_name(f"{made[2].path.name}{ending}"))
    assert [found.data_version for found in store.list_all("thing", "tiny")] == ["3", "2", "0"]
    assert store.list_all("thing", "other") == []


SLOW_BUILD = """
import sys, time
from pathlib import Path
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.file_lock import try_lock

def build(out):
    (out / "started").write_text("")
    time.sleep(float(sys.argv[2]))
    return BuildResult("done")

ArtifactStore(Path(sys.argv[1])).obtain("thing", "tiny", {"a": 1}, build)
"""


def started_build(root: Path, seconds: float) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(root), str(seconds)])
    wait_until(
        lambda: find_now(root, "thing/tiny/*.partial/started"), "the build", possible=lambda: process.poll() is None
    )
    return process


def test_a_second_build_of_a_partition_waits_for_the_first_and_finds_its_result(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    process = started_build(tmp_path, 2)
    found = ArtifactStore(tmp_path).obtain("thing", "tiny", IDENTITY, lambda out: pytest.fail("built twice"))
    assert found.hit
    assert process.wait() == 0
    assert "thing of target tiny is being materialized by another run" in caplog.text


def test_a_second_build_goes_on_where_the_one_that_it_waited_for_was_killed(tmp_path: Path):
    process = started_build(tmp_path, 60)
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    assert not ArtifactStore(tmp_path).obtain("thing", "tiny", IDENTITY, writing("x")).hit
    process.wait()


def test_a_result_is_claimed_by_one_at_a_time_and_published_beside_another(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    store.obtain("thing", "tiny", {"a": 0}, writing("earlier"))
    with store.claim("thing", "tiny", IDENTITY) as claim:
        assert claim is not None
        with store.claim("thing", "tiny", {"a": 2}) as other:
            assert other is None
        (claim.folder / "half.txt").write_text("half")
    with store.claim("thing", "tiny", IDENTITY) as claim:
        assert claim is not None
        assert (claim.folder / "half.txt").exists(), "files of an interrupted attempt stay"
        claim.publish(BuildResult("published"))
    assert store.load_current("thing", "tiny").data_version == "earlier"
    with store.claim("thing", "tiny", IDENTITY) as claim:
        assert claim is None
    found = store.obtain("thing", "tiny", IDENTITY, writing("never"))
    assert (found.hit, found.data_version) == (True, "published")


def test_a_build_waits_for_a_lock_that_it_shares_with_others(tmp_path: Path):
    store, lock, order = ArtifactStore(tmp_path), tmp_path / "shared" / "lock", []
    lock.parent.mkdir()
    with try_lock(lock) as held:
        assert held
        made = threading.Thread(
            target=store.obtain, args=("thing", "tiny", IDENTITY, writing("x", order)), kwargs={"lock": lock}
        )
        made.start()
        time.sleep(0.2)
        assert not order
    made.join()
    assert order == ["x"]


def test_a_killed_build_leaves_neither_result_nor_lock(tmp_path: Path):
    process = started_build(tmp_path, 60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    store = ArtifactStore(tmp_path)
    assert store.find("thing", "tiny") is None
    assert store.obtain("thing", "tiny", IDENTITY, writing("x")).data_version == "x"
