"""The real Weights & Biases, MLflow and Trackio, offline: two sessions of a training are one run with each step once."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_toys import RESULT, make_draft, make_point, report_session, report_two_sessions

from draftworks.config.trackers import TrackersSpec
from draftworks.training.history import EvalPoint, list_eval_scalars, list_train_scalars

pytestmark = pytest.mark.trackers
NAMES = {*list_train_scalars(make_point(1)), *list_eval_scalars(EvalPoint(1, 1.0, RESULT))}
STEPS = [1, 11, 21, 31]


def read_wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format behind a header, blocks of 32 KiB."""
    block, at, parts = 1 << 15, 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb
    from wandb.proto import wandb_internal_pb2

    try:
        report_two_sessions({"wandb": {"project": "drafts"}}, tmp_path)
    finally:
        wandb.teardown()  # as at the end of a program: its own process, which writes the files, has ended

    steps: dict[str, list[int]] = {}
    runs = []
    for path in sorted(tmp_path.glob("trackers/wandb/wandb/offline-run-*/*.wandb")):
        for data in read_wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for name in NAMES & items.keys():
                    steps.setdefault(name, []).append(items["_step"])
    assert {run.run_id for run in runs} == {runs[0].run_id}
    assert runs[0].project == "drafts"
    assert {item.key: json.loads(item.value_json) for item in runs[0].config.update}["training.lr"] == 1e-3
    assert steps == dict.fromkeys(NAMES, STEPS)


def test_mlflow_in_an_sqlite_file(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    report_two_sessions({"mlflow": {"uri": uri, "experiment": "drafts"}}, tmp_path / "out")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("drafts")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == make_draft(tmp_path).name
    assert run.data.params["options.layers"] == "1,2"
    assert run.data.tags["draftworks.target"] == "tiny"
    for name in NAMES:
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, name)] == STEPS


def test_mlflow_that_cannot_be_reached_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    spec = TrackersSpec.model_validate({"mlflow": {"uri": "http://127.0.0.1:1"}})
    (warning,) = report_session(spec, tmp_path, 1, 1)
    assert "tracker mlflow" in warning


def test_trackio(tmp_path: Path) -> None:
    """In a process of its own: the library reads its folder once, and another test has told it another one."""
    values = {"trackio": {"project": "drafts", "folder": str(tmp_path / "curves")}}
    session = "from pathlib import Path; from tracker_toys import report_two_sessions; "
    session += f"report_two_sessions({values}, Path({str(tmp_path / 'out')!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", session], check=True, env=environment)
    with sqlite3.connect(tmp_path / "curves" / "drafts.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in found}) == 1
    steps: dict[str, list[int]] = {}
    for _, step, metrics in found:
        for name in NAMES & json.loads(metrics).keys():
            steps.setdefault(name, []).append(step)
    assert steps == dict.fromkeys(NAMES, STEPS)
