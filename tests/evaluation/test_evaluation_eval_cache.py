"""EvalCache produces an entry once, finds it again, and replaces it with a reason when it no longer fits.
With several processes on one cache, some of them killed, an entry is always complete or absent.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import eval_cache_producer
import pytest
from eval_cache_producer import CONFIG, FILES, GO, LOG, generation_in, inputs_of, writer
from kill_points import killed_before

from draftworks.errors import StoreError
from draftworks.evaluation.eval_cache import EvalCache, EvalConfig
from draftworks.storage.identity import digest

META = "eval_cache_meta.json"
NOBODY = 65534


@pytest.fixture
def cache(tmp_path: Path) -> EvalCache:
    return EvalCache(tmp_path)


def never(folder: Path) -> None:
    raise AssertionError("produced without need")


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_is_produced_once_then_found_and_produced_again_when_invalidated(cache: EvalCache):
    produced = []

    def produce(folder: Path) -> None:
        produced.append(folder)
        writer(len(produced))(folder)

    assert cache.try_get(CONFIG) is None
    first = cache.get_or_produce(CONFIG, produce, inputs_of(0))
    second = cache.get_or_produce(CONFIG, never, inputs_of(0))
    assert (first.hit, second.hit) == (False, True)
    assert first.path == second.path == cache.try_get(CONFIG, verify=True) == cache.dir_for(CONFIG)
    assert cache.invalidate(CONFIG)
    assert cache.try_get(CONFIG) is None
    assert not cache.invalidate(CONFIG)
    third = cache.get_or_produce(CONFIG, produce, inputs_of(0))
    assert (third.hit, third.rebuilt_because, generation_in(third.path)) == (False, None, 2)
    assert len(set(produced)) == 2


def test_an_entry_lies_where_the_reference_has_it_and_records_what_it_is(cache: EvalCache, tmp_path: Path):
    entry = cache.get_or_produce(CONFIG, writer(0), inputs_of(0))
    assert entry.path == tmp_path / "eval_cache" / CONFIG.cache_key
    assert contents(entry.path) == {*FILES, META}
    meta = json.loads((entry.path / META).read_text())
    assert meta.keys() == {"schema_version", "key", "identity", "inputs", "files"}
    assert (meta["key"], meta["identity"]) == (entry.key, list(CONFIG.identity_fields()))
    assert (meta["inputs"], meta["files"].keys()) == (inputs_of(0), set(FILES))


def test_an_entry_of_other_inputs_is_found_only_by_who_does_not_mind(cache: EvalCache):
    entry = cache.get_or_produce(CONFIG, writer(0), inputs_of(0))
    assert cache.try_get(CONFIG) == cache.try_get(CONFIG, inputs_of(0)) == entry.path
    assert cache.try_get(CONFIG, inputs_of(1)) is None


def test_configs_share_an_entry_only_if_their_identity_is_the_same(cache: EvalCache):
    cache.get_or_produce(CONFIG, writer(0), inputs_of(0))
    assert cache.get_or_produce(replace(CONFIG, micro_batch_size=7), never, inputs_of(0)).hit
    assert cache.try_get(replace(CONFIG, max_len=1)) is None


def test_the_data_version_is_of_the_key_and_the_inputs_in_any_order(cache: EvalCache):
    entry = cache.get_or_produce(CONFIG, writer(0), {"target": "t", "eval_data": "e"})
    same = cache.get_or_produce(CONFIG, never, {"eval_data": "e", "target": "t"})
    assert entry.data_version == same.data_version
    assert entry.data_version == digest([entry.key, [["eval_data", "e"], ["target", "t"]]])
    assert cache.get_or_produce(CONFIG, writer(0), {"eval_data": "e", "target": "u"}).data_version != same.data_version


def test_a_config_says_where_its_cache_is(tmp_path: Path):
    assert EvalCache.for_config(replace(CONFIG, cache_dir=str(tmp_path))) == EvalCache(tmp_path)
    assert EvalCache.key(CONFIG) == CONFIG.cache_key
    with pytest.raises(ValueError, match="cache_dir` is not set"):
        EvalCache.for_config(CONFIG)


CHANGED_INPUTS = [
    ({"eval_data": "old", "target": "t"}, "eval_data changed from old to new"),
    ({"eval_data": "new", "target": "s"}, "target changed from s to t"),
    ({"target": "t"}, "eval_data changed from nothing to new"),
    ({"eval_data": "new", "target": "t", "template": "x"}, "template changed from x to nothing"),
    ({"eval_data": "old", "target": "s"}, "eval_data changed from old to new; target changed from s to t"),
]


@pytest.mark.parametrize(("before", "reason"), CHANGED_INPUTS)
def test_an_entry_of_other_inputs_is_produced_again_and_says_why(cache: EvalCache, before: dict, reason: str):
    after = {"eval_data": "new", "target": "t"}
    cache.get_or_produce(CONFIG, writer(1), before)
    with pytest.raises(StoreError, match=f"rebuilding is off: {reason}"):
        cache.get_or_produce(CONFIG, never, after, rebuild=False)
    assert generation_in(cache.try_get(CONFIG, verify=True)) == 1
    entry = cache.get_or_produce(CONFIG, writer(2), after)
    assert (entry.hit, entry.rebuilt_because, generation_in(entry.path)) == (False, reason, 2)
    assert cache.get_or_produce(CONFIG, never, after, rebuild=False).hit


def test_without_rebuilding_what_is_absent_is_still_produced(cache: EvalCache):
    assert not cache.get_or_produce(CONFIG, writer(0), inputs_of(0), rebuild=False).hit


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("refs.jsonl", lambda path: path.write_text(""), "truncated or altered: expected 40 bytes, found 0"),
    ("refs.jsonl", lambda path: path.unlink(), "cannot be read"),
    ("deep/rows.txt", lambda path: path.write_text("8\n" * 20), "altered: expected digest"),
    (META, lambda path: path.unlink(), "cannot be read"),
    (META, lambda path: path.write_text(path.read_text()[:-20]), "Invalid JSON"),
    (META, lambda path: path.write_text("[]"), "expected keys with values, found "),
    (META, lambda path: rewrite(path, schema_version=2), "schema_version: expected 1, found 2"),
    (META, lambda path: rewrite(path, key="0123456789abcdef"), "is of another evaluation"),
    (
        META,
        lambda path: rewrite(path, files={"refs.jsonl": 40}),
        "files.refs.jsonl: expected keys with values, found 40",
    ),
]


@pytest.mark.parametrize(("name", "damage", "problem"), DAMAGE)
def test_a_damaged_entry_is_named_and_produced_again(cache: EvalCache, name: str, damage: Callable, problem: str):
    path = cache.get_or_produce(CONFIG, writer(0), inputs_of(0)).path / name
    damage(path)
    for ask in (
        lambda: cache.try_get(CONFIG, verify=True),
        lambda: cache.get_or_produce(CONFIG, never, inputs_of(0), rebuild=False),
    ):
        with pytest.raises(StoreError, match=f"{path}.*{problem}"):
            ask()
    unseen = "digest" in problem
    assert (cache.try_get(CONFIG) is not None) == unseen
    entry = cache.get_or_produce(CONFIG, writer(1), inputs_of(0))
    assert not entry.hit
    assert str(path) in entry.rebuilt_because
    assert problem in entry.rebuilt_because
    assert generation_in(cache.try_get(CONFIG, verify=True)) == 1


def test_a_file_in_the_place_of_an_entry_gives_way(cache: EvalCache):
    cache.root.mkdir()
    cache.dir_for(CONFIG).write_text("no folder")
    entry = cache.get_or_produce(CONFIG, writer(0), inputs_of(0))
    assert "cannot be read" in entry.rebuilt_because
    assert generation_in(entry.path) == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_producer_that_fails_changes_nothing(cache: EvalCache, replaced: bool):
    def failing(folder: Path) -> None:
        (folder / "refs.jsonl").write_text("half")
        raise RuntimeError("disk on fire")

    if replaced:
        cache.get_or_produce(CONFIG, writer(1), inputs_of(1))
    before = contents(cache.root)
    with pytest.raises(RuntimeError, match="disk on fire"):
        cache.get_or_produce(CONFIG, failing, inputs_of(2))
    assert {name.partition("/")[0] for name in contents(cache.root) ^ before} <= {f"{CONFIG.cache_key}.lock"}
    assert (cache.try_get(CONFIG, verify=True) is not None) == replaced
    assert cache.get_or_produce(CONFIG, writer(2), inputs_of(2)).path == cache.dir_for(CONFIG)


def test_what_crashed_producers_left_is_swept_and_that_of_other_keys_is_not(cache: EvalCache):
    other = EvalCache.key(replace(CONFIG, max_len=1))
    for name in (f"{CONFIG.cache_key}.tmp-01234567", f"{CONFIG.cache_key}.old-01234567", f"{other}.tmp-01234567"):
        (cache.root / name).mkdir(parents=True)
        (cache.root / name / "refs.jsonl").write_text("half")
    cache.get_or_produce(CONFIG, writer(0), inputs_of(0))
    left = {path.name for path in cache.root.iterdir()}
    assert left == {CONFIG.cache_key, f"{CONFIG.cache_key}.lock", f"{other}.tmp-01234567"}


def test_who_loses_a_race_of_renames_takes_the_winners_entry(cache: EvalCache, tmp_path: Path):
    """As on a file system where locks do not work: the winner's entry appears while this one is being produced."""
    winner = EvalCache(tmp_path / "winner").get_or_produce(CONFIG, writer(1), inputs_of(0)).path

    def produce(folder: Path) -> None:
        writer(2)(folder)
        shutil.copytree(winner, cache.dir_for(CONFIG))

    entry = cache.get_or_produce(CONFIG, produce, inputs_of(0))
    assert entry.hit
    assert generation_in(entry.path) == 1
    assert {path.name for path in cache.root.iterdir()} == {CONFIG.cache_key, f"{CONFIG.cache_key}.lock"}


def test_who_loses_a_race_to_an_entry_of_other_inputs_is_told(cache: EvalCache, tmp_path: Path):
    winner = EvalCache(tmp_path / "winner").get_or_produce(CONFIG, writer(1), inputs_of(1)).path
    with pytest.raises(StoreError, match="does not fit: eval_data changed from data-1 to data-0"):
        cache.get_or_produce(CONFIG, lambda _: shutil.copytree(winner, cache.dir_for(CONFIG)), inputs_of(0))


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_cache_dir_that_is_a_file_is_refused_before_anything_is_produced(tmp_path: Path, below: str):
    (tmp_path / "file").write_text("")
    cache_dir = tmp_path / "file" / below
    with pytest.raises(StoreError, match=f"cache_dir {cache_dir}: expected a folder that this user may write to"):
        EvalCache(cache_dir).get_or_produce(CONFIG, never, inputs_of(0))


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def as_one_who_may_not_write(folder: Path, work: Callable[[], object]) -> object:
    """Context of a user without write permission; root ignores permissions, so it becomes another user."""
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        path.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        return work()
    finally:
        os.seteuid(user)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


def test_a_cache_dir_that_cannot_be_written_to_is_refused_before_anything_is_produced(shared_folder: Path):
    def produce_and_fail() -> None:
        with pytest.raises(StoreError, match=rf"cache_dir {shared_folder}: expected .* Permission denied"):
            EvalCache(shared_folder).get_or_produce(CONFIG, never, inputs_of(0))

    as_one_who_may_not_write(shared_folder, produce_and_fail)


def test_a_cache_that_cannot_be_written_to_still_gives_what_it_has(shared_folder: Path):
    cache = EvalCache(shared_folder)
    cache.get_or_produce(CONFIG, writer(0), inputs_of(0))

    def find_and_fail() -> None:
        assert cache.get_or_produce(CONFIG, never, inputs_of(0)).hit
        with pytest.raises(StoreError, match="may write to"):
            cache.get_or_produce(CONFIG, never, inputs_of(1))
        with pytest.raises(StoreError, match="may write to"):
            cache.invalidate(CONFIG)
        assert cache.try_get(CONFIG, verify=True) is not None

    as_one_who_may_not_write(shared_folder, find_and_fail)


def test_paths_of_any_script_are_recorded(cache: EvalCache):
    config = EvalConfig('évals/聊天 "|,\n.jsonl', chat_template="{% if x %}\\n😀")
    assert cache.get_or_produce(config, writer(0), inputs_of(0)).path == cache.try_get(config, verify=True)


def test_the_cache_imports_no_torch():
    code = "import sys, draftworks.evaluation.eval_cache; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KILLS = 6
LAST = 10**6


def started(cache_dir: Path, mode: str) -> subprocess.Popen[str]:
    """Start a process and wait until it has imported everything."""
    command = [sys.executable, eval_cache_producer.__file__, str(cache_dir), mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def churning(cache_dir: Path) -> Iterator[None]:
    """Context in which another process replaces and invalidates the entry again and again; it is killed at the end."""
    process = started(cache_dir, "churn")
    try:
        yield
        assert process.poll() is None, "it should have gone on until it was killed"
    finally:
        process.kill()
        process.communicate()


def assert_whole_or_absent(cache: EvalCache) -> None:
    path = cache.try_get(CONFIG, verify=True)
    assert path is None or generation_in(path) >= 0


def assert_goes_on(cache: EvalCache, generation: int) -> None:
    """The next call succeeds and leaves nothing but the entry."""
    entry = cache.get_or_produce(CONFIG, writer(generation), inputs_of(generation))
    assert generation_in(entry.path) == generation
    assert {path.name for path in cache.root.iterdir()} == {CONFIG.cache_key, f"{CONFIG.cache_key}.lock"}


def test_two_processes_at_once_produce_once(tmp_path: Path):
    processes = [started(tmp_path, "once") for _ in range(2)]
    (tmp_path / GO).touch()
    found = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(entry.pop("hit") for entry in found) == [False, True]
    assert found[0] == found[1]
    assert len((tmp_path / LOG).read_text().splitlines()) == 1


def test_a_killed_producer_leaves_no_entry_or_a_whole_one(tmp_path: Path):
    cache, moments = EvalCache(tmp_path), random.Random(5)
    for kill in range(KILLS):
        with churning(tmp_path):
            time.sleep(moments.uniform(0.0, 0.2))
        assert_whole_or_absent(cache)
        assert_goes_on(cache, LAST + kill)


def production(cache: EvalCache) -> None:
    cache.get_or_produce(CONFIG, writer(2), inputs_of(2))


def invalidation(cache: EvalCache) -> None:
    cache.invalidate(CONFIG)


@pytest.mark.parametrize(
    ("work", "replaces"), [(production, False), (production, True), (invalidation, True)], ids=["new", "again", "gone"]
)
def test_a_kill_before_any_change_of_the_file_system_leaves_no_entry_or_a_whole_one(
    tmp_path: Path, work: Callable[[EvalCache], None], replaces: bool
):
    for event in count():
        cache = EvalCache(tmp_path / str(event))
        if replaces:
            cache.get_or_produce(CONFIG, writer(1), inputs_of(1))
        killed = killed_before(event, partial(work, cache))
        assert_whole_or_absent(cache)
        assert_goes_on(cache, 3)
        if not killed:
            break
    assert event >= 5


def test_a_reader_sees_one_whole_entry_or_none_while_it_is_replaced_and_invalidated(tmp_path: Path):
    cache, seen = EvalCache(tmp_path), set()
    with churning(tmp_path):
        while len(seen) < 40:
            if cache.try_get(CONFIG, verify=True) is not None:
                with suppress(OSError):  # replaced or invalidated since it was found
                    seen.add(cache.dir_for(CONFIG).stat().st_mtime_ns)
