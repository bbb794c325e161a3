"""What tests begin from is made once, copied whole, and never taken damaged."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import built_once
import pytest
from built_once import digest_code, take


class Maker:
    """Counts how often it made something."""

    def __init__(self, text: str = "made") -> None:
        self.text, self.times = text, 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_text(self.text)
        (folder / "link").symlink_to("deep/a")


def test_it_is_made_once_and_each_copy_is_its_own(tmp_path: Path):
    make = Maker()
    first, second = (take("x", make, tmp_path / name, tmp_path / "cache") for name in ("a", "b"))
    (first / "deep" / "a").write_text("changed by a test")
    assert make.times == 1
    assert (second / "link").read_text() == "made"
    assert take("x", make, tmp_path / "c", tmp_path / "cache").joinpath("deep/a").read_text() == "made"


@pytest.mark.parametrize("damage", ["altered", "missing", "more", "unlisted"])
def test_what_is_damaged_is_made_again(tmp_path: Path, damage: str):
    make, cache = Maker(), tmp_path / "cache"
    take("x", make, tmp_path / "a", cache)
    [kept] = [each for each in cache.iterdir() if each.is_dir()]
    file = kept / "folder" / "deep" / "a"
    {
        "altered": lambda: file.write_text("made?"),
        "missing": file.unlink,
        "more": lambda: file.with_name("b").write_text(""),
        "unlisted": (kept / "files.json").unlink,
    }[damage]()
    assert (take("x", make, tmp_path / "b", cache) / "deep" / "a").read_text() == "made"
    assert make.times == 2


def test_what_failed_while_it_was_made_is_not_kept(tmp_path: Path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError):
        take("x", fail, tmp_path / "a", tmp_path / "cache")
    assert not (take("x", Maker(), tmp_path / "a", tmp_path / "cache") / "half").exists()


def _take(folder: Path, number: int, made: Path) -> None:
    def make(into: Path) -> None:
        with open(made, "a") as file:
            file.write("once\n")
        (into / "a").write_text("made")

    assert (take("x", make, folder / str(number), folder / "cache") / "a").read_text() == "made"


def test_processes_that_ask_at_once_wait_for_one_that_makes(tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_take, args=(tmp_path, number, tmp_path / "made")) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "once\n"


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, made = tmp_path / "cache", {name: Maker("x" * 1000) for name in "abc"}
    monkeypatch.setattr(built_once, "MAX_BYTES", 5000)  # two of three: each is its file, a link to it, and a list
    for at, name in enumerate("abc"):
        take(name, made[name], tmp_path / name, cache)
        [kept] = cache.glob(f"*-{name}")
        os.utime(kept, (at, at))
    left = {each.name[-1] for each in cache.iterdir() if each.is_dir()}
    assert "c" in left
    assert "a" not in left


def test_the_key_is_of_all_that_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Files of the product, helpers and pins; not what a run leaves beside them."""
    before = digest_code.__wrapped__()
    for name in ("draftworks/a.py", "tests/toys/b.py", "tests/x/conftest.py", "registry/c.yaml", "constraints.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    for name in ("pyproject.toml",):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(built_once, "ROOT", tmp_path)
    found = [digest_code.__wrapped__()]
    assert found[0] != before
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_text("22")
        found.append(digest_code.__wrapped__())
    assert len(set(found)) == 7
    (tmp_path / "draftworks" / "__pycache__").mkdir()
    (tmp_path / "draftworks" / "__pycache__" / "a.pyc").write_text("")
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "x").write_text("")
    assert digest_code.__wrapped__() == found[-1]
