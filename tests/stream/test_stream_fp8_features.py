"""Training on features that are stored as scaled float8_e4m3fn: streamed = stored, resumed = straight, packed = padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coverings import gate_or_long
from stream_toys import TRAINING, StreamFiles

from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.checkpoint_files import CheckpointFolder


@pytest.fixture(params=gate_or_long(["fp8", "fp8_taps"], ["fp8_taps"]))
def files(stream_files: StreamFiles, request: pytest.FixtureRequest) -> StreamFiles:
    """Held-out features are captured as eval features are: not encoded."""
    files = replace(stream_files, capture_options={"dtype": "bfloat16"})
    files.capture("heldout")
    files = replace(files, capture_options={"dtype": "bfloat16", "storage": request.param})
    files.plan_set()
    files.capture("train")
    return files


def train_stored(files: StreamFiles, out: str, **changes: Any) -> dict[str, Any]:
    return train(files.train_run(out, streamed=False, **changes), ProgramContext())


def test_a_streamed_draft_is_the_stored_one_bit_for_bit(files: StreamFiles):
    with files.producing() as done:
        streamed = train(files.train_run("streamed"), ProgramContext())
    stored = train_stored(files, "stored")
    assert streamed["weights_digest"] == stored["weights_digest"]
    assert streamed["heldout"] == stored["heldout"]
    bf16 = sum(each.tokens for each in done) * 4 * 128 * 2
    expected = {"fp8": (128 + 4) / 256, "fp8_taps": (3 * (128 + 4) + 256) / 1024}
    assert sum(each.nbytes for each in done) == bf16 * expected[files.capture_options["storage"]]
    assert open_store(files.place.store).health()["samples"] == 0


def test_a_resumed_draft_is_the_straight_one_and_a_packed_one_equals_it_to_rounding(files: StreamFiles):
    training = TRAINING.model_copy(update={"save_every": 2, "keep_checkpoints": 9, "publish": "last"})
    straight = train_stored(files, "straight", training=training)
    run = files.train_run("straight", streamed=False, training=training)
    halfway = CheckpointFolder(run.checkpoints, run.run_id).final(2)
    resumed = train_stored(files, "resumed", training=training, resume_from=halfway)
    assert [each["from_step"] for each in resumed["sessions"]] == [0, 2]
    assert resumed["weights_digest"] == straight["weights_digest"]
    packed = train_stored(files, "packed", training=training.model_copy(update={"pack_tokens": 48}))
    assert packed["last_loss"] == pytest.approx(straight["last_loss"], rel=1e-4)
    assert packed["heldout"]["eval/avg_loss"] == pytest.approx(straight["heldout"]["eval/avg_loss"], rel=1e-4)
