"""Rows of a source that grows: each line once and whole, the first ones always the same, iterators from where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftworks.config.registry_files import DatasetSpec
from draftworks.data import arriving_rows
from draftworks.data.arriving_rows import DatasetReader, IteratorReader
from draftworks.data.growing_files import count_lines, digest_head, find_source, read_head
from draftworks.errors import ConfigError, DataError

LOGS = DatasetSpec(name="logs", files=["*.jsonl"])


def row(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"question {number}"}]}


def write(folder: Path, name: str, *numbers: int, rest: str = "") -> None:
    with (folder / name).open("a") as stream:
        stream.write("".join(json.dumps(row(number)) + "\n" for number in numbers) + rest)


def read_all(reader: DatasetReader | IteratorReader, count: int = 2) -> list[str]:
    found: list[str] = []
    while (arrived := reader.read(count)).rows:
        found += [each.turns[0].content for each in arrived.conversations]
    return found


def test_each_line_comes_once_when_it_is_whole_also_to_a_reader_that_goes_on(tmp_path: Path):
    half = json.dumps(row(3))
    write(tmp_path, "a.jsonl", 0, 1, 2, rest=half[:9])
    reader = DatasetReader(LOGS, tmp_path, None, to_end=False)
    assert read_all(reader) == [f"question {n}" for n in range(3)]
    write(tmp_path, "a.jsonl", rest=half[9:] + "\n")
    write(tmp_path, "b.jsonl", 4, rest="no row\n")
    following = DatasetReader(LOGS, tmp_path, reader.get_state(), to_end=False)
    assert read_all(following) == ["question 3", "question 4"]
    assert not following.is_over
    assert count_lines(LOGS, tmp_path) == 6


def test_a_source_that_is_read_to_its_end_has_the_last_line_without_its_end_and_is_over(tmp_path: Path):
    write(tmp_path, "a.jsonl", 0, rest=json.dumps(row(1)))
    reader = DatasetReader(LOGS, tmp_path, None, to_end=True)
    assert read_all(reader) == ["question 0", "question 1"]
    assert reader.is_over


def test_the_first_rows_have_one_digest_while_the_files_grow_and_are_waited_for(tmp_path: Path):
    write(tmp_path, "a.jsonl", 0, 1)
    with pytest.raises(DataError, match=r"expected the first 3 rows.*found 2.*vocabulary_samples"):
        read_head(LOGS, tmp_path, 3)
    before = digest_head(LOGS, tmp_path, 2)
    write(tmp_path, "a.jsonl", 2)
    assert digest_head(LOGS, tmp_path, 2) == before
    assert digest_head(LOGS, tmp_path, 3) != before


def test_what_cannot_grow_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.parquet").write_text("")
    for name, words in (("a.json", "found a list"), ("b.parquet", "expected JSONL")):
        with pytest.raises(DataError, match=words):
            DatasetReader(LOGS.model_copy(update={"files": [name]}), tmp_path, None, False).read(1)
    with pytest.raises(DataError, match="tokenized already"):
        DatasetReader(LOGS.model_copy(update={"format": "tokens"}), tmp_path, None, False)
    write(tmp_path, "c.jsonl", 0, 1)
    reader = DatasetReader(LOGS, tmp_path, None, False)
    reader.read(2)
    (tmp_path / "c.jsonl").write_text("")
    with pytest.raises(DataError, match="only grows"):
        reader.read(2)


class Rollouts:
    """An iterator that can go on; without `restore` where `cls` lacks it."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            yield row(self.next - 1)

    def state(self) -> int:
        return self.next


class Resumable(Rollouts):
    def restore(self, state: int) -> None:
        self.next = state


class Entry:
    def __init__(self, loaded: type) -> None:
        self.load = lambda: loaded


def test_an_iterator_goes_on_from_its_state_or_is_refused_after_an_interruption(monkeypatch: pytest.MonkeyPatch):
    known = {"resumable": Entry(Resumable), "forgetful": Entry(Rollouts)}
    monkeypatch.setattr(arriving_rows, "find_source", known.__getitem__)
    first = IteratorReader("resumable", None, is_new=True)
    assert first.read(3).rows == 3
    following = IteratorReader("resumable", first.get_state(), is_new=False)
    assert read_all(following) == ["question 3", "question 4"]
    assert following.is_over
    with pytest.raises(ConfigError, match="methods state\\(\\) and restore"):
        IteratorReader("forgetful", "3", is_new=False)
    with pytest.raises(ConfigError, match="expected an entry point of the group draftworks.sources, found 'none'"):
        find_source("none")
