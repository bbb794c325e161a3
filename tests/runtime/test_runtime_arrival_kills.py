"""SIGKILL of both sides of a stream in arrival order: started again, they end with the undisturbed weights."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrival_toys import SAMPLES, ArrivalRun, publish, put_samples
from gloo_ranks import on_ranks
from resumable_runs import assert_bit_equal
from safetensors.torch import load_file, save_file
from torch.multiprocessing import ProcessExitedException
from waiting import HANG_S

from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.features.contracts import SampleRef
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.training.backend import ensure_process_group


def channel_of(folder: Path) -> StreamingRefChannel:
    return StreamingRefChannel(folder / "channel", idle_timeout_s=HANG_S)


def _publish_and_die(rank: int, folder: Path, refs: list[SampleRef]) -> None:
    """Publish references, and die in the middle of a line."""
    channel_of(folder).open_writer().publish_batch(refs)
    with (folder / "channel" / "refs.jsonl").open("ab") as lines:
        lines.write(b'["s9","')
    os.kill(os.getpid(), signal.SIGKILL)


def _train_and_die(rank: int, folder: Path, after: int) -> None:
    def kill(step: int) -> None:
        if step == after:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"retain": False, "free_at": "checkpoint", "mode": "disaggregated"}
    trainer = ArrivalRun.of_channel(folder, channel_of(folder), **options).fit(on_step=kill)
    save_file(trainer.weights(), folder / "weights.safetensors")


@pytest.mark.slow
def test_kills_of_both_sides_change_nothing_of_the_weights(tmp_path: Path):
    folder, attempts = tmp_path / "killed", itertools.count()

    def run(work: Callable[..., None], *args: Any) -> None:
        rendezvous = tmp_path / f"ranks{next(attempts)}"
        rendezvous.mkdir()
        on_ranks(1, rendezvous, work, folder, *args)

    refs = put_samples(SharedDirFeatureStore(folder / "store"))
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run(_publish_and_die, refs[:14])
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run(_train_and_die, 1)
    publish(channel_of(folder), refs)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run(_train_and_die, 5)
    run(_train_and_die, 0)

    straight = ArrivalRun.of_channel(tmp_path / "straight", channel_of(tmp_path / "straight"))
    publish(channel_of(tmp_path / "straight"), put_samples(straight.store))
    with ensure_process_group(torch.device("cpu")):
        expected = straight.fit().weights()
    assert_bit_equal(load_file(folder / "weights.safetensors"), expected)
    assert SharedDirFeatureStore(folder / "store").health()["samples"] == len(SAMPLES) - 24
