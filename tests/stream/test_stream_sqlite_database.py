"""The control plane's file: what is refused, what survives, and several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from dataflow_toys import Clock, controller_of, ids_of, toy_slim_ref, toy_task
from waiting import wait_until

from draftworks.errors import StoreError
from draftworks.storage.shared_folder import Mount
from draftworks.stream import sqlite_database
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore

FORK = multiprocessing.get_context("fork")


def test_a_reopened_database_has_all_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plane.db"
    first = controller_of(SQLiteMetadataStore(path), Clock())
    first.add_tasks([toy_task(0)])
    first.commit_samples([toy_slim_ref("a"), toy_slim_ref("b")])
    first.ack(["a"], 3)
    first.close()
    with pytest.raises(StoreError, match="closed"):
        first.count_tasks()
    second = controller_of(SQLiteMetadataStore(path), Clock())
    assert second.count_tasks().pending == 1
    assert ids_of(second.read_refs(acked=False).refs) == ["b"]
    assert second.read_progress().acked_step == 3


def test_commits_are_durable_and_write_ahead(tmp_path: Path) -> None:
    store = SQLiteMetadataStore(tmp_path / "plane.db")
    with store._database.reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"PRAGMA user_version = {sqlite_database.SCHEMA_VERSION + 1}", "a newer version of Draftworks"),
        ("PRAGMA user_version = 0", "an older version of Draftworks"),
        ("PRAGMA application_id = 7", "another program's"),
    ],
)
def test_another_schema_is_refused_and_left_as_it_is(statement: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    SQLiteMetadataStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=said) as caught:
        SQLiteMetadataStore(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program's"):
        SQLiteMetadataStore(path)
    assert path.read_bytes() == before
    path.write_bytes(b"no database at all, but some text " * 200)
    with pytest.raises(StoreError, match="not SQLite's"):
        SQLiteMetadataStore(path)


@pytest.mark.parametrize("place", ["/proc/plane/plane.db", "{file}/plane.db", "{folder}"])
def test_a_place_that_cannot_be_written_is_one_clear_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = place.format(file=tmp_path / "file", folder=tmp_path)
    with pytest.raises(StoreError, match="expected a folder that this user may write to") as caught:
        SQLiteMetadataStore(Path(path))
    assert str(caught.value).startswith(path)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_database, "find_mount", lambda path: Mount(Path("/data"), "nfs4"))
    with pytest.raises(StoreError, match=r"network file system \(nfs4, mounted on /data\)"):
        SQLiteMetadataStore(tmp_path / "plane.db")
    assert list(tmp_path.iterdir()) == []


def test_a_stuck_process_is_reported_after_the_timeout(tmp_path: Path) -> None:
    store = SQLiteMetadataStore(tmp_path / "plane.db", busy_timeout_s=0.2)
    other = sqlite3.connect(tmp_path / "plane.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process has held"):
        controller_of(store, Clock()).add_tasks([toy_task(0)])
    other.execute("ROLLBACK")
    assert controller_of(store, Clock()).add_tasks([toy_task(0)]) == 1
    other.close()


def test_a_forked_child_opens_its_own_connection(tmp_path: Path) -> None:
    controller = controller_of(SQLiteMetadataStore(tmp_path / "plane.db"), Clock())
    controller.commit_samples([toy_slim_ref("parent")])
    child = FORK.Process(target=lambda: controller.commit_samples([toy_slim_ref("child")]))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert ids_of(controller.iterate_refs()) == ["parent", "child"]


def test_memory_is_not_shared_with_a_forked_child() -> None:
    controller = controller_of(InMemoryMetadataStore(), Clock())
    answers = FORK.SimpleQueue()

    def ask() -> None:
        try:
            controller.count_tasks()
        except StoreError as error:
            answers.put(str(error))

    child = FORK.Process(target=ask)
    child.start()
    child.join()
    assert "forked" in answers.get()


def _work(path: Path, worker: str) -> None:
    controller = controller_of(SQLiteMetadataStore(path), time.time)
    while controller.count_tasks().open:
        for lease in controller.lease_tasks(worker, 3):
            controller.commit_samples(
                [toy_slim_ref(each, lease.task.task_id) for each in lease.task.sample_ids], [lease]
            )
            controller.commit_samples([toy_slim_ref("shared by all")])
            controller.ack(lease.task.sample_ids, 1)


def test_processes_share_tasks_and_no_sample_is_committed_or_acknowledged_twice(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    controller = controller_of(SQLiteMetadataStore(path), time.time)
    tasks = [toy_task(number) for number in range(40)]
    controller.add_tasks(tasks)
    workers = [FORK.Process(target=_work, args=(path, f"w{number}")) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert controller.count_tasks().done == len(tasks)
    found = ids_of(controller.iterate_refs())
    assert sorted(found) == sorted(["shared by all", *(each for task in tasks for each in task.sample_ids)])
    assert ids_of(controller.iterate_refs(acked=False)) == ["shared by all"]


def _commit_until_killed(path: Path, written: Path) -> None:
    controller = controller_of(SQLiteMetadataStore(path), time.time)
    start = len(list(controller.iterate_refs()))
    with written.open("a", buffering=1) as stream:
        for number in range(start, 10**6):
            batch = [f"s{number}.{place}" for place in range(5)]
            controller.commit_samples([toy_slim_ref(each) for each in batch])
            controller.ack(batch[:2], number + 1)
            stream.write(f"{number}\n")


def test_kills_in_the_middle_of_commits_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    path, written = tmp_path / "plane.db", tmp_path / "written"
    written.touch()
    for turn in range(4):
        child = FORK.Process(target=_commit_until_killed, args=(path, written))
        lines = len(written.read_text().split())
        child.start()
        wait_until(lambda lines=lines: len(written.read_text().split()) >= lines + 3, "three commits")
        time.sleep(0.002 * turn)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    confirmed = [int(line) for line in written.read_text().split()]
    controller = controller_of(SQLiteMetadataStore(path), time.time)
    found = ids_of(controller.iterate_refs())
    assert len(set(found)) == len(found)
    batches = {each.partition(".")[0] for each in found}
    assert len(found) == 5 * len(batches)  # whole batches or none
    assert {f"s{number}" for number in confirmed} <= batches
    acked = set(ids_of(controller.iterate_refs(acked=True)))
    assert {f"s{number}.{place}" for number in confirmed for place in range(2)} <= acked
    with controller.store._database.reading() as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_processes_that_make_the_file_at_once_all_open_it(tmp_path: Path) -> None:
    for attempt in range(5):
        go = FORK.Event()
        path = tmp_path / f"plane{attempt}.db"

        def open_it(path: Path = path, go=go) -> None:
            go.wait()
            SQLiteMetadataStore(path).close()

        processes = [FORK.Process(target=open_it) for _ in range(4)]
        for process in processes:
            process.start()
        go.set()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
