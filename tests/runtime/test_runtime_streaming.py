"""Streamed training is stored training: the same steps from features that are captured while it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stream_toys import TRAINING, StreamFiles

from draftworks.config.streaming import StreamingSpec
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

PACKED = TRAINING.model_copy(update={"pack_tokens": 48})


def train_streamed(files: StreamFiles, *workers: str, training=TRAINING) -> dict:
    with files.producing(*workers, training=training):
        return train(files.train_run("streamed", training=training), ProgramContext())


def assert_nothing_left(files: StreamFiles) -> None:
    assert open_store(files.place.store).health()["samples"] == 0


@pytest.mark.parametrize("training", [TRAINING, PACKED], ids=["padded", "packed"])
def test_a_streamed_draft_is_the_stored_one_bit_for_bit(stream_files: StreamFiles, train_stored, training):
    streamed, stored = train_streamed(stream_files, training=training), train_stored(training)
    assert streamed["weights_digest"] == stored["weights_digest"]
    assert streamed["heldout"] == stored["heldout"]
    assert_nothing_left(stream_files)


@pytest.mark.parametrize("settings", [{"keep": "capture_again"}, {"free_at": "checkpoint"}], ids=str)
def test_when_features_are_freed_changes_nothing_of_the_draft(stream_files: StreamFiles, train_stored, settings):
    chosen = StreamingSpec(watermark={"samples": 8}, timeout_s=60, **settings)
    files = replace(stream_files, settings=chosen)
    assert train_streamed(files)["weights_digest"] == train_stored()["weights_digest"]
    assert_nothing_left(files)


def test_two_producers_share_the_work(stream_files: StreamFiles, train_stored):
    with stream_files.producing("one", "two") as done:
        draft = train(stream_files.train_run("streamed"), ProgramContext())
    assert draft["weights_digest"] == train_stored()["weights_digest"]
    assert sum(each.captured for each in done) == 12  # of 13 samples, two have the same tokens
