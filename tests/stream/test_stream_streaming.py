"""Streamed training is stored training: the same steps from features that are captured while it goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from draft_run_files import OPTIONS
from stream_toys import STREAMS, TRAINING, SerialEngine, StreamFiles
from waiting import HANG_S

from draftworks.capture.engine import load_engine
from draftworks.config.capture import CaptureSpec
from draftworks.config.features import StreamingSpec
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

PACKED = TRAINING.model_copy(update={"pack_tokens": 48})


def train_streamed(files: StreamFiles, *workers: str, training=TRAINING, streams=STREAMS, **draft) -> dict:
    with files.producing(*workers, training=training, streams=streams):
        return train(files.train_run("streamed", training=training, **draft), ProgramContext())


def assert_nothing_left(files: StreamFiles) -> None:
    assert open_store(files.place.store).health()["samples"] == 0


BLOCKS = {"block_size": 3, "num_layers": 1, "layer_ids": [2, 4, 5], "num_anchors": 8, "intermediate_size": 32}
OPTIONS_OF = {
    "eagle3": OPTIONS,
    "peagle": {
        "num_depths": 2,
        "num_layers": 1,
        "layer_ids": [2, 4, 5],
        "draft_vocab_size": 64,
        "intermediate_size": 32,
    },
    "dflash": BLOCKS,
    "dflash2": BLOCKS,
    "domino": BLOCKS,
    "dspark": BLOCKS,
    "xpress": BLOCKS | {"refiner_rank": 6},
    "lilicorr": BLOCKS,
}


LAYOUTS = {"padded": TRAINING, "packed": PACKED}
GATE = {
    "padded": {"eagle3", "dflash"},
    "packed": {"eagle3", "peagle", "lilicorr"},
}
"""A chain with both, and of blocks one with each: a stream hands out samples, and what is done with them is of stored training too."""


@pytest.mark.parametrize(
    ("strategy", "layout"), gate_or_long(product(OPTIONS_OF, LAYOUTS), lambda cell: cell[0] in GATE[cell[1]])
)
def test_a_streamed_draft_is_the_stored_one_bit_for_bit(stream_files: StreamFiles, train_stored, strategy, layout):
    training = LAYOUTS[layout]
    draft = {"strategy": strategy, "options": OPTIONS_OF[strategy]}
    spec = resolve_strategy(strategy)
    read = spec.list_features(stream_files.target.num_layers, spec.parse_options(OPTIONS_OF[strategy], where=strategy))
    streamed = train_streamed(stream_files, training=training, streams=read, **draft)
    stored = train_stored(training, **draft)
    assert streamed["weights_digest"] == stored["weights_digest"]
    assert streamed["heldout"] == stored["heldout"]
    assert_nothing_left(stream_files)


def test_a_streamed_layer_of_the_target_is_the_stored_one_bit_for_bit(mtp_target, tmp_path: Path):
    """MTP, which reads the last hidden state alone."""
    target = mtp_target("deepseek_v3")
    engine = load_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
    files = StreamFiles(tmp_path, target, lambda: SerialEngine(engine)).make()
    streamed = train_streamed(files, training=PACKED, streams=("last",), strategy="mtp", options={})
    assert_nothing_left(files)
    files.capture("train")
    run = files.train_run("stored", streamed=False, training=PACKED, strategy="mtp", options={})
    stored = train(run, ProgramContext())
    assert streamed["weights_digest"] == stored["weights_digest"]
    assert streamed["heldout"] == stored["heldout"]


def test_every_known_strategy_is_streamed():
    assert {*OPTIONS_OF, "mtp"} == {name for name in list_strategies() if resolve_strategy(name).exports}


@pytest.mark.parametrize("settings", [{"keep": "capture_again"}, {"free_at": "checkpoint"}], ids=str)
def test_when_features_are_freed_changes_nothing_of_the_draft(stream_files: StreamFiles, train_stored, settings):
    chosen = StreamingSpec(watermark={"samples": 8}, timeout_s=HANG_S, **settings)
    files = replace(stream_files, settings=chosen)
    assert train_streamed(files)["weights_digest"] == train_stored()["weights_digest"]
    assert_nothing_left(files)


def test_two_producers_share_the_work(stream_files: StreamFiles, train_stored):
    with stream_files.producing("one", "two") as done:
        draft = train(stream_files.train_run("streamed"), ProgramContext())
    assert draft["weights_digest"] == train_stored()["weights_digest"]
    assert sum(each.captured for each in done) == 12  # of 13 samples, two have the same tokens
