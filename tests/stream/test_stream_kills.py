"""SIGKILL of producers, of the trainer and of SGLang, as processes of their own: started again, they end with the stored draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import end_tree, kill_all
from sglang_toys import SGLANG
from stream_toys import TRAINING, StreamFiles
from waiting import HANG_S, wait_until

from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.config.features import StreamingSpec
from draftworks.config.run_files import RunFile, TargetFiles
from draftworks.features.open_store import open_store
from draftworks.stream.training_stream import open_controller

SLOW_STEPS = TRAINING.model_copy(update={"epochs": 12, "save_every": 4, "keep_checkpoints": 1})


@pytest.fixture
def start(tmp_path: Path):
    """Starts a program on a run file; kills what still runs at the end."""
    started: list[subprocess.Popen] = []

    def begin(program: str, run: RunFile) -> subprocess.Popen:
        path = run.save(tmp_path / "runs" / f"{program}-{len(started)}.yaml")
        with path.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", f"draftworks.programs.{program}", str(path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        return started[-1]

    yield begin
    for process in started:
        end_tree(process)


@pytest.mark.slow
def test_kills_of_a_producer_and_of_the_trainer_change_nothing_of_the_draft(
    stream_files: StreamFiles, train_stored, start
):
    files = replace(
        stream_files,
        settings=StreamingSpec(watermark={"samples": 8}, timeout_s=HANG_S, lease_s=2, keep="capture_again"),
    )
    progress = open_controller(files.place).read_progress
    run, training = files.train_run("streamed", training=SLOW_STEPS), files.produce_run("first", SLOW_STEPS)
    trainer, producer = start("train", run), start("produce", training)
    wait_until(lambda: progress().acked_step >= 3)
    producer.kill()
    start("produce", files.produce_run("second", SLOW_STEPS))
    wait_until(lambda: progress().acked_step >= 10)
    trainer.kill()
    trainer.wait()
    trainer = start("train", run)
    assert trainer.wait() == 0
    report = json.loads((files.folder / "streamed" / "config.json").read_text())
    assert report["weights_digest"] == train_stored(SLOW_STEPS)["weights_digest"]
    assert open_store(files.place.store).health()["samples"] == 0


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_killed_in_a_training_is_started_again_and_the_draft_is_equal_to_rounding(
    tiny_target: TargetFiles, tiny_sglang: SGLangEngine, tmp_path: Path, train_stored, start
):
    files = StreamFiles(
        tmp_path,
        tiny_target,
        lambda: tiny_sglang,
        capture_options={"backend": "sglang_server"},
        settings=StreamingSpec(watermark={"samples": 8}, timeout_s=HANG_S, keep="capture_again"),
    ).make()
    progress = open_controller(files.place).read_progress
    trainer = start("train", files.train_run("streamed", training=SLOW_STEPS))
    producer = start("produce", files.produce_run(training=SLOW_STEPS).model_copy(update={"sglang": SGLANG}))
    wait_until(lambda: progress().acked_step >= 3, possible=lambda: trainer.poll() is None)
    server = psutil.Process(producer.pid).children(recursive=True)
    assert len(server) >= 3  # SGLang with its scheduler and its detokenizer
    kill_all(server)
    assert trainer.wait() == 0
    assert producer.wait() == 0
    assert "is restarted" in (tmp_path / "runs" / "produce-1.log").read_text()
    log = (tmp_path / "runs" / "train-0.log").read_text()
    report = json.loads(log[log.rindex("\n{") :])
    stored = train_stored(SLOW_STEPS)
    assert report["steps"] == stored["steps"]
    assert report["last_loss"] == pytest.approx(stored["last_loss"], rel=1e-3)
    assert report["heldout"]["eval/avg_loss"] == pytest.approx(stored["heldout"]["eval/avg_loss"], rel=1e-3)
    assert open_store(files.place.store).health()["samples"] == 0
