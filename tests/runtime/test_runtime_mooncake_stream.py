"""Streamed over Mooncake is stored: on two ranks, bit for bit, whichever of the processes is killed meanwhile."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks
from stream_cast import RANKS, Kill, StreamCast
from stream_toys import TRAINING, StreamFiles

from draftworks.config.run_files import StoreSpec
from draftworks.config.streaming import StreamingSpec
from draftworks.errors import StoreLostError
from draftworks.features.open_store import open_store

pytestmark = pytest.mark.mooncake
LONG = TRAINING.model_copy(update={"epochs": 12, "save_every": 4, "keep_checkpoints": 1})
SETTINGS = StreamingSpec(watermark={"samples": 8}, timeout_s=120, lease_s=4, keep="capture_again")
"""Producers are needed until the last step."""


@pytest.fixture(scope="module")
def stored(tiny_target, tiny_engine, tmp_path_factory) -> str:
    """Weights of the stored training on two ranks."""
    files = StreamFiles(tmp_path_factory.mktemp("stored"), tiny_target, lambda: tiny_engine).make()
    files.capture("train")
    path = files.train_run("stored", streamed=False, training=LONG).save(files.folder / "run.yaml")
    ranks = ForkedRanks.start("draftworks.programs.train", [str(path)], RANKS, files.folder / "r", files.folder / "log")
    assert ranks.wait(240) == [0] * RANKS, (files.folder / "log").read_text()
    return json.loads((files.folder / "stored" / "config.json").read_text())["weights_digest"]


@pytest.fixture
def cast(stream_files: StreamFiles) -> StreamCast:
    return StreamCast(replace(stream_files, settings=SETTINGS), LONG)


def test_streamed_over_mooncake_is_stored(cast: StreamCast, stored: str):
    assert cast.train()["weights_digest"] == stored
    assert cast.deaths == {}


@pytest.mark.parametrize(
    ("victim", "program"),
    [("owner", None), ("master", None), ("memory", "memory"), ("control", "control"), ("produce", "produce")]
    + [("train", "train")],
)
def test_a_kill_changes_nothing(cast: StreamCast, stored: str, victim: str, program: str | None):
    assert cast.train([Kill(victim, step=9)])["weights_digest"] == stored
    assert cast.killed == [victim]
    assert cast.deaths == ({} if program is None else {program: 1})


@pytest.mark.parametrize("seed", [1])
def test_kills_at_random_times_change_nothing(cast: StreamCast, stored: str, seed: int):
    drawn = random.Random(seed)
    names = ["owner", "master", "memory", "control", "produce", "train"]
    drawn.shuffle(names)
    kills = [
        Kill(name, 3 + 4 * number + drawn.randrange(4), drawn.uniform(0, 0.3)) for number, name in enumerate(names)
    ]
    assert cast.train(kills)["weights_digest"] == stored
    assert cast.killed == names


def test_a_store_that_does_not_run_is_one_error_in_the_given_time(tmp_path: Path):
    with pytest.raises(StoreLostError, match=r"address\.json does not run, and was not started within 0\.5 s"):
        open_store(StoreSpec(kind="mooncake", root=tmp_path, timeout_s=0.5))
