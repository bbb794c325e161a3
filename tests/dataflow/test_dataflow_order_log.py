"""The log of the order: whole steps only, resumed where the checkpoint is, replayed as it was."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from features_toys import toy_ref
from hypothesis import given
from hypothesis import strategies as st

from draftworks.dataflow.order_log import OrderLog, read_order, read_trained_ids, replay_order
from draftworks.errors import ConfigError, StoreError

SIZE = 2


def ids_of(step: int, life: int = 0) -> list[str]:
    return [f"s{100 * life + SIZE * step + index}" for index in range(SIZE)]


def steps_of(path: Path) -> list[list[str]]:
    return [list(logged.samples) for logged in read_order(path)]


@given(lives=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=4), data=st.data())
def test_the_log_is_the_order_of_the_lineage(lives, data):
    """Each life resumes at a checkpoint of the last, trains some steps and may be killed in the middle of a line."""
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder) / "order.jsonl", []
        for life, (steps, cut) in enumerate(lives):
            keep = data.draw(st.integers(0, len(expected)))
            expected = expected[:keep]
            with OrderLog(path, SIZE, keep) as log:
                for step in range(keep + 1, keep + steps + 1):
                    log.append(step, ids_of(step, life))
                    expected.append(ids_of(step, life))
            partial = json.dumps([len(expected) + 1, ids_of(9)]).encode()
            with path.open("ab") as stream:
                stream.write(partial[:cut])
            assert steps_of(path) == expected
            assert list(read_trained_ids(path, keep)) == [each for step in expected[:keep] for each in step]


def test_a_replayed_log_is_a_queue_in_its_order(tmp_path):
    with OrderLog(tmp_path / "log", SIZE) as log:
        log.append(1, ["s5", "s1"])
        log.append(2, ["s0", "s4"])
    refs = [toy_ref(number) for number in range(6)]
    queue = replay_order(tmp_path / "log", iter(refs), SIZE)
    assert queue.get(9) == [refs[5], refs[1], refs[0], refs[4]]
    assert queue.is_drained
    with pytest.raises(StoreError, match="names 1 samples without a reference, such as s5"):
        replay_order(tmp_path / "log", refs[:5], SIZE)
    with pytest.raises(ConfigError, match="global_batch_size 2, found 3"):
        replay_order(tmp_path / "log", refs, 3)


def test_an_empty_log_replays_nothing(tmp_path):
    OrderLog(tmp_path / "log", SIZE).close()
    assert replay_order(tmp_path / "log", [], SIZE).is_drained


def test_a_log_of_another_training_is_refused(tmp_path):
    path = tmp_path / "log"
    with OrderLog(path, SIZE) as log:
        log.append(1, ids_of(1))
        with pytest.raises(ValueError, match="continues with step 2, found step 4"):
            log.append(4, ids_of(4))
    with pytest.raises(ConfigError, match="logged with global_batch_size 2, found 8"):
        OrderLog(path, 8, keep_steps=1)
    with pytest.raises(StoreError, match="at least 5 steps, which the checkpoint has behind it, found 1"):
        OrderLog(path, SIZE, keep_steps=5)
    with pytest.raises(StoreError, match="found 1"):
        list(read_trained_ids(path, 5))
    with pytest.raises(StoreError, match="expected the log of a training's order"):
        OrderLog(tmp_path / "none", SIZE, keep_steps=1)
    assert steps_of(path) == [ids_of(1)]


@pytest.mark.parametrize(
    "content", ["{}\n", "[]\n", "x\n", '{"schema": "draftworks.order.0", "global_batch_size": 2}\n', "[" * 5000 + "\n"]
)
def test_another_version_is_named(tmp_path, content):
    (tmp_path / "log").write_text(content)
    with pytest.raises(StoreError, match="no log of a training's order of this version"):
        steps_of(tmp_path / "log")


@pytest.mark.parametrize("line", ["", "{}", "[2, []]", "[1, [3]]", "[1]", "null", '[1, "s", 2]', "[1, 5]"])
def test_a_damaged_step_is_named(tmp_path, line):
    OrderLog(tmp_path / "log", SIZE).close()
    with (tmp_path / "log").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(StoreError, match="line 2 is damaged"):
        steps_of(tmp_path / "log")


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="expected a file that this user may write"):
        OrderLog(tmp_path / "file" / "log", SIZE)
