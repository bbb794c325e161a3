"""A streamed training on two ranks takes the steps of one, and its features are freed once by all."""

from __future__ import annotations

import pytest
import torch
from forked_ranks import ForkedRanks
from safetensors.torch import load_file
from stream_toys import TRAINING, StreamFiles

from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.stream.training_stream import open_controller
from draftworks.training.history import History

TWO_RANKS = TRAINING.model_copy(update={"processes": 2, "micro_batch_size": 1, "device": "cpu"})


@pytest.mark.slow
def test_a_streamed_training_on_two_ranks_is_that_of_one_to_rounding(stream_files: StreamFiles):
    folder = stream_files.folder
    run = stream_files.train_run("two", training=TWO_RANKS)
    with stream_files.producing(training=TWO_RANKS):
        ranks = ForkedRanks.start(
            "draftworks.programs.train", [str(run.save(folder / "two.yaml"))], 2, folder, folder / "two.log"
        )
        assert ranks.wait() == [0, 0], (folder / "two.log").read_text()
    assert open_controller(stream_files.place).read_progress().acked_step == 6
    assert open_store(stream_files.place.store).health()["samples"] == 0

    stream_files.capture("train")
    train(stream_files.train_run("one", streamed=False), ProgramContext())
    found, expected = (load_file(folder / out / "model.safetensors") for out in ("two", "one"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Of a gradient near 0, AdamW makes a step whose size is rounding: a single element may be further off than the rest.
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=3e-5)
        difference = (found[name].double() - tensor.double()).norm()
        assert difference <= 1e-5 * tensor.double().norm(), (name, difference)
    two, one = (History.load(folder / out / "history.json") for out in ("two", "one"))
    for mine, theirs in zip(two.train, one.train, strict=True):
        assert (mine.step, mine.tokens) == (theirs.step, theirs.tokens)
        assert abs(mine.loss - theirs.loss) <= 1e-4 * abs(theirs.loss)
