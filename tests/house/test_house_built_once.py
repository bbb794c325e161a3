"""What tests begin from is made once, by one process, and never taken damaged."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import built_once
import pytest
from built_once import digest_code, find_or_make


class Maker:
    """Counts how often it made something."""

    def __init__(self, text: str = "made") -> None:
        self.text, self.times = text, 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_text(self.text)
        (folder / "link").symlink_to("deep/a")


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> list:
    """Locks of folders that a test asked for end with it, and before it where it clears them."""
    locks: list = []
    monkeypatch.setattr(built_once, "_in_use", locks)
    yield locks
    locks.clear()


def test_it_is_made_once_where_it_stays(tmp_path: Path):
    make = Maker()
    first, second = (find_or_make("x", make, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert (first / "link").read_text() == "made"
    assert make.times == 1


@pytest.mark.parametrize("damage", ["altered", "missing", "more", "unlisted"])
def test_what_is_damaged_is_made_again(tmp_path: Path, used: list, damage: str):
    make = Maker()
    folder = find_or_make("x", make, tmp_path)
    file = folder / "deep" / "a"
    {
        "altered": lambda: file.write_text("made?"),
        "missing": file.unlink,
        "more": lambda: file.with_name("b").write_text(""),
        "unlisted": (folder.parent / "files.json").unlink,
    }[damage]()
    with pytest.raises(OSError, match="another process uses it"):
        find_or_make("x", make, tmp_path)
    used.clear()
    assert (find_or_make("x", make, tmp_path) / "deep" / "a").read_text() == "made"
    assert make.times == 2


def test_what_failed_while_it_was_made_is_not_kept(tmp_path: Path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError):
        find_or_make("x", fail, tmp_path)
    assert not (find_or_make("x", Maker(), tmp_path) / "half").exists()


def _ask(folder: Path, made: Path) -> None:
    def make(into: Path) -> None:
        with open(made, "a") as file:
            file.write("once\n")
        (into / "a").write_text("made")

    assert (find_or_make("x", make, folder) / "a").read_text() == "made"


def test_processes_that_ask_at_once_wait_for_one_that_makes(tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_ask, args=(tmp_path / "cache", tmp_path / "made")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "once\n"


def test_what_nobody_uses_goes_first_what_was_not_used_for_longest(
    tmp_path: Path, used: list, monkeypatch: pytest.MonkeyPatch
):
    """Of four folders three fit; the oldest is in use, so the one after it goes."""
    monkeypatch.setattr(built_once, "MAX_BYTES", 3 * 2500)  # each is its file, a link to it, and a list
    folders = {}
    for at, name in enumerate("abcd"):
        if name == "d":
            del used[1:]
        folders[name] = find_or_make(name, Maker("x" * 1000), tmp_path)
        os.utime(folders[name].parent, (at, at))
    assert [name for name in "abcd" if folders[name].exists()] == ["a", "c", "d"]


def test_the_key_is_of_all_that_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Files of the product, helpers and pins; not what a run leaves beside them."""
    names = ("draftworks/a.py", "tests/toys/b.py", "tests/x/conftest.py", "registry/c.yaml", *built_once.PINS)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(built_once, "ROOT", tmp_path)
    found = [digest_code.__wrapped__()]
    for name in names:
        (tmp_path / name).write_text("22")
        found.append(digest_code.__wrapped__())
    assert len(set(found)) == 1 + len(names)
    for beside in ("draftworks/__pycache__", "var"):
        (tmp_path / beside).mkdir()
        (tmp_path / beside / "a.pyc").write_text("")
    assert digest_code.__wrapped__() == found[-1]
    shutil.rmtree(tmp_path / "draftworks")
    assert digest_code.__wrapped__() != found[-1]
