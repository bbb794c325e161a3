"""Records are replaced whole or not at all: by concurrent processes, and by processes that are killed at any point."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kill_points import killed_before
from service_toys import STRATEGY, TARGET, record, served

from draftworks.errors import StoreError
from draftworks.service.register import REGISTER, Canary, ConflictError, InService, ServiceRegister

MAX_CHANGES = 200


@pytest.fixture
def register(tmp_path: Path) -> ServiceRegister:
    return ServiceRegister(tmp_path, TARGET, STRATEGY)


def put(register: ServiceRegister, name: str, expected: str | None) -> None:
    register.replace(expected, lambda now: record(1 if now is None else now.number + 1, name))


def test_nothing_is_in_service_at_first(register: ServiceRegister):
    assert register.find() is None
    assert register.read_history() == ()
    with pytest.raises(StoreError, match="draftworks promote small eagle3"):
        register.require()


def test_only_staging_files_that_are_written_under_the_lease_are_swept(register: ServiceRegister):
    """Another promotion may be writing what it has accepted at this moment."""
    put(register, "a", None)
    own, others = register.folder / f".{REGISTER}.1.tmp", register.folder / ".accepted.json.2.tmp"
    own.touch()
    others.touch()
    put(register, "b", "a")
    assert (own.exists(), others.exists()) == (False, True)


def test_what_was_replaced_stays_in_the_history(register: ServiceRegister):
    for name, expected in (("a", None), ("b", "a"), ("a", "b")):
        put(register, name, expected)
    assert register.require().draft == served("a")
    assert [one.draft.digest for one in register.read_history()] == ["a", "b", "a"]


def test_another_draft_than_the_expected_one_is_a_conflict_and_nothing_moves(register: ServiceRegister):
    put(register, "a", None)
    for expected in (None, "b"):
        with pytest.raises(ConflictError, match="found draft a"):
            put(register, "c", expected)
    assert len(register.read_history()) == 1


def test_an_error_while_the_record_is_made_changes_nothing(register: ServiceRegister):
    def fail(_: InService | None) -> InService:
        raise StoreError("no")

    put(register, "a", None)
    with pytest.raises(StoreError, match="no"):
        register.replace("a", fail)
    assert register.replace("a", lambda _: None) == register.require()
    assert len(register.read_history()) == 1


def test_a_record_with_all_fields_survives_its_file(register: ServiceRegister):
    written = replace(record(1, "a"), canary=Canary(served("b"), 0.25), forced=True, previous=None)
    register.replace(None, lambda _: written)
    assert register.require() == written
    values = json.loads((register.folder / "in_service.json").read_text())
    assert {"digest", "path", "previous", "who", "when", "why", "schema"} <= values.keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "expected schema 1, found 2"),
        ({"path": "../elsewhere"}, "not inside the folder"),
        ({"path": "/etc"}, "not inside the folder"),
        ({"digest": "UP/../x"}, "not a name"),
        ({"number": "1"}, "number"),
        ({"target": "other"}, "was the file copied"),
        ({"when": "yesterday"}, "yesterday"),
        ({"canary": {"share": 1.5}}, "canary"),
    ],
)
def test_a_damaged_record_is_one_clear_error(register: ServiceRegister, change: dict, said: str):
    put(register, "a", None)
    path = register.folder / "in_service.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StoreError, match=said):
        register.find()
    for text in ("[]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(StoreError, match="in_service.json"):
            register.find()


def test_a_lost_history_is_said(register: ServiceRegister):
    for name, expected in (("a", None), ("b", "a"), ("c", "b")):
        put(register, name, expected)
    (register.folder / "history" / "00000001.json").unlink()
    with pytest.raises(StoreError, match="none of 1"):
        register.read_history()


def test_killed_at_any_change_of_the_file_system_one_whole_record_is_in_service(tmp_path: Path):
    outcomes = []
    for event in range(MAX_CHANGES):
        register = ServiceRegister(tmp_path / str(event), TARGET, STRATEGY)
        put(register, "a", None)
        killed = killed_before(event, partial(put, register, "b", "a"))
        outcomes.append(register.require().draft.digest)
        assert [one.draft.digest for one in register.read_history()] == ["a", "b"][: 1 + (outcomes[-1] == "b")]
        put(register, "c", outcomes[-1])
        assert [one.draft.digest for one in register.read_history()][-2:] == [outcomes[-1], "c"]
        assert not list(register.folder.rglob("*.tmp"))
        if not killed:
            break
    assert not killed
    changed = outcomes.index("b")
    assert outcomes == ["a"] * changed + ["b"] * (len(outcomes) - changed)
    assert len(outcomes) - changed > 1  # it was killed after the commit too


def _contend(var: Path, worker: int, results: multiprocessing.SimpleQueue) -> None:
    register, done = ServiceRegister(var, TARGET, STRATEGY), []
    for step in range(6):
        now = register.require().draft.digest
        name = f"w{worker}-{step}"
        try:
            put(register, name, now)
            done.append((name, now))
        except ConflictError:
            pass
    results.put(done)


def test_of_concurrent_replacements_each_follows_the_one_it_names(register: ServiceRegister):
    put(register, "a", None)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_contend, args=(register.var, number, results)) for number in range(3)]
    for worker in workers:
        worker.start()
    seen = set()
    while any(worker.is_alive() for worker in workers):
        seen.add(register.require().draft.digest)  # whole at every moment
        time.sleep(0.001)
    pairs = dict(pair for _ in workers for pair in results.get())
    names = [one.draft.digest for one in register.read_history()]
    assert set(names) == {"a", *pairs}
    assert seen <= set(names)
    assert all(pairs[after] == before for before, after in zip(names, names[1:]))
