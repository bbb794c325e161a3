"""The capture program on two ranks: they share the samples, and rank 0 reports for both.
Features belong to the tokens that they were captured from; equal sample ids are not enough.
The memory of a stream's Mooncake store.
Training with `pack_tokens`: the same draft with the same metrics, and clear errors before it begins.
`draftworks engine` serves a target at the URL of its entry, and refuses what it cannot do before it starts anything.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from capture_toys import OneLayerOff, WatchedEngine
from draft_run_files import DFLASH_OPTIONS, OPTIONS, TRAINING, RunFiles
from forked_ranks import ForkedRanks
from ports import reserve_port
from processes import ending, wait_until_ended
from sglang_toys import SGLANG
from typer.testing import CliRunner
from waiting import HANG_S

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.sglang_hosts import require_server
from draftworks.config.registry_files import CaptureSpec, TrainingSpec
from draftworks.config.run_files import CaptureRun, FeatureSet, TargetFiles
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import ConfigError, DataError, StoreError, UnsoundEngineError
from draftworks.features.manifest import read_feature_set, write_feature_set
from draftworks.features.open_store import open_store
from draftworks.mooncake.service import MIN_SEGMENT_BYTES
from draftworks.programs.assembly import open_samples
from draftworks.programs.capture import capture
from draftworks.programs.cli import app
from draftworks.programs.memory import find_segment_bytes
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target


def capture_run(tmp_path: Path, target: TargetFiles) -> CaptureRun:
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 99, 6).astype(np.int32) for _ in range(12)]
    write_tokens(tmp_path / "tokens", [TokenRow(f"s{i}", row, np.ones(6, np.bool_)) for i, row in enumerate(ids)])
    (tmp_path / "out").mkdir()
    return CaptureRun(
        out=tmp_path / "out", target=target, tokens=tmp_path / "tokens", taps=[2], store=tmp_path / "store",
        capture=CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu"),
    )  # fmt: skip


def test_an_engine_that_is_not_the_target_stores_nothing(tmp_path: Path, tiny_target: TargetFiles, monkeypatch):
    run = capture_run(tmp_path, tiny_target)
    made: list[OneLayerOff] = []

    def load(*arguments) -> OneLayerOff:
        made.append(OneLayerOff(load_engine(*arguments)))
        return made[-1]

    monkeypatch.setattr("draftworks.programs.capture.load_engine", load)
    with pytest.raises(UnsoundEngineError, match="stream hf2 differs by .*; it is hf3"):
        capture(run, ProgramContext())
    assert open_store(run.store).health()["tensors"] == 0
    assert [engine.shared_after for engine in made] == [None]


def test_an_engine_is_shared_with_other_ranks_once_it_was_compared(tmp_path: Path, tiny_target, monkeypatch):
    run = capture_run(tmp_path, tiny_target)
    watched = WatchedEngine(load_engine(tiny_target, run.capture, torch.device("cpu")))
    monkeypatch.setattr("draftworks.programs.capture.load_engine", lambda *arguments: watched)
    capture(run, ProgramContext())
    assert watched.shared_after is not None
    assert 0 < watched.shared_after < len(watched.rows)


def test_two_ranks_capture_one_set(tmp_path: Path, tiny_target: TargetFiles):
    run = capture_run(tmp_path, tiny_target)
    run_file, log = run.save(tmp_path / "capture.yaml"), tmp_path / "capture.log"
    ranks = ForkedRanks.start("draftworks.programs.capture", [str(run_file)], 2, tmp_path / "ranks", log)
    assert ranks.wait() == [0, 0], log.read_text()
    output = log.read_text()
    report = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    assert report["captured_samples"] == report["samples"] == 12
    assert report["probe"]["probe_compared"] == "hf2, last"
    assert report["data_version"] == read_feature_set(run.out).data_version
    assert len(list((run.store.root / "shards").iterdir())) == 2


class Reader:
    """The part of a strategy that `open_samples` uses."""

    name = "reader"
    feature_names = ("hf2", "last")


def rows(seed: int) -> list[TokenRow]:
    generator = np.random.default_rng(seed)
    return [TokenRow(f"s{i}", generator.integers(5, 99, 6).astype(np.int32), np.ones(6, np.bool_)) for i in range(5)]


@pytest.fixture
def run(tmp_path: Path, tiny_target: TargetFiles) -> CaptureRun:
    """Five samples, captured by the program."""
    write_tokens(tmp_path / "tokens", rows(seed=1))
    settings = CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu")
    run = CaptureRun(
        out=tmp_path / "out", target=tiny_target, tokens=tmp_path / "tokens", taps=[2], capture=settings,
        store=tmp_path / "store",
    )  # fmt: skip
    report = capture(run, ProgramContext())
    assert report["captured_samples"] == 5
    return run


def opened(run: CaptureRun):
    return open_samples(FeatureSet(tokens=run.tokens, features=run.out), run.store, Reader(), run.target)


def test_captured_features_are_opened_with_their_tokens(run: CaptureRun):
    samples = opened(run)
    tensors, _ = samples.store.get(samples.refs[3])
    assert tensors["input_ids"].tolist() == rows(seed=1)[3].input_ids.tolist()
    assert tensors["last"].shape == (6, 128)


def test_features_of_other_tokens_under_the_same_ids_are_refused(run: CaptureRun):
    write_tokens(run.tokens, [*rows(seed=1)[:3], *rows(seed=2)[3:]])
    with pytest.raises(StoreError, match=r"features of 2 of 5 samples are of other tokens .* the first is s3. Capture"):
        opened(run)


def test_features_that_do_not_name_their_tokens_are_refused(run: CaptureRun):
    found = read_feature_set(run.out)
    nameless = [replace(ref, metadata={}) for ref in found.refs]
    write_feature_set(run.out, nameless, found.identity, found.streams, found.store)
    with pytest.raises(StoreError, match="features of 5 of 5 samples are of other tokens"):
        opened(run)


def test_other_masks_take_the_same_features(run: CaptureRun):
    masked = [TokenRow(row.sample_id, row.input_ids, np.arange(6) > 2) for row in rows(seed=1)]
    write_tokens(run.tokens, masked)
    samples = opened(run)
    assert samples.store.get(samples.refs[0])[0]["loss_mask"].tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("peak", [0, 1, 10**6, 10**9, 10**12])
def test_the_memory_holds_a_fifth_more_than_the_features_and_is_never_too_small_to_own(peak: int):
    """Mooncake rounds objects up and leaves holes; a store without room stands still."""
    found = find_segment_bytes(peak)
    assert found >= 1.2 * peak
    assert found >= peak + MIN_SEGMENT_BYTES
    assert found <= 1.3 * peak + 8 * MIN_SEGMENT_BYTES


PACKED = TRAINING.model_copy(update={"pack_tokens": 48})


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def trained(files: RunFiles, training: TrainingSpec, **changes) -> dict:
    out = files.folder / f"draft-{training.pack_tokens}"
    return train(files.train_run(out=out, training=training, **changes), ProgramContext())


@pytest.mark.parametrize("strategy", ["eagle3", "dflash"])
def test_packing_gives_the_same_draft_to_rounding(files: RunFiles, strategy: str, capsys) -> None:
    changes = {"strategy": "dflash", "options": DFLASH_OPTIONS, "vocab_mapping": None} if strategy == "dflash" else {}
    padded, packed = (trained(files, training, **changes) for training in (TRAINING, PACKED))
    assert (packed["steps"], packed["tokens"]) == (padded["steps"], padded["tokens"])
    assert packed["last_loss"] == pytest.approx(padded["last_loss"], rel=1e-4)
    assert packed["heldout"]["eval/avg_loss"] == pytest.approx(padded["heldout"]["eval/avg_loss"], rel=1e-4)
    assert packed["heldout"]["eval/supervised_tokens"] == padded["heldout"]["eval/supervised_tokens"]
    assert "in packed rows of at most 48 tokens" in capsys.readouterr().out


def test_a_sample_longer_than_the_row_is_refused_by_name_before_training(files: RunFiles, capsys) -> None:
    short = TRAINING.model_copy(update={"pack_tokens": 12})
    with pytest.raises(
        DataError, match=r"samples do not fit into a row of pack_tokens 12; the longest is train\d with 2\d"
    ):
        trained(files, short)
    assert "step=" not in capsys.readouterr().out
    own_row = short.model_copy(update={"pack_overlong": "own_row"})
    assert trained(files, own_row)["steps"] == 8


def test_a_loss_that_is_made_of_padding_is_refused(files: RunFiles) -> None:
    with pytest.raises(ConfigError, match=r"pack_tokens is set, but eagle3 with loss: specforge takes means"):
        trained(files, PACKED, options={**OPTIONS, "loss": "specforge"})


LAYERS = (1, 4, 6)
"""Whose outputs are hf2, hf5 and hf7."""


@pytest.fixture
def registry(tmp_path: Path, tiny_folder: Path) -> Path:
    root = tmp_path / "registry"
    (root / "targets").mkdir(parents=True)
    (root / "datasets").mkdir()
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (root / "deployment.yaml").write_text(yaml.safe_dump({"sglang": {"python": SGLANG.python}}))
    write_target(root, tiny_folder, {"url": f"http://127.0.0.1:{reserve_port()}", "spool": str(tmp_path / "spool")})
    return root


def write_target(root: Path, model: Path, server: dict | None, backend: str = "sglang_server") -> None:
    capture = {
        "backend": backend,
        "device": "cpu",
        "compute_dtype": "float32",
        **({"server": server} if server else {}),
    }
    options = {"layer_ids": [layer + 1 for layer in LAYERS], "draft_vocab_size": 64}
    entry = {
        "model": str(model), "dataset": "chats", "max_length": 96, "responses": {"max_new_tokens": 24},
        "capture": capture, "strategies": {"eagle3": {"options": options}},
    }  # fmt: skip
    (root / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))


def refusal(root: Path) -> str:
    asked = CliRunner().invoke(app, ["engine", "small", "--registry", str(root)])
    assert asked.exit_code == 1
    assert len(asked.stderr.splitlines()) == 1
    return asked.stderr


@pytest.mark.parametrize("server", [None, {"url": "http://elsewhere:30000", "spool": "/tmp/s"}])
def test_an_entry_that_names_no_server_of_this_machine_is_refused(registry: Path, tiny_folder: Path, server):
    write_target(registry, tiny_folder, server)
    expected = (
        "url: expected http://127.0.0.1:PORT, found http://elsewhere:30000" if server else "url and spool: capture:"
    )
    assert expected in refusal(registry)


def test_an_entry_of_another_backend_is_refused(registry: Path, tiny_folder: Path):
    write_target(registry, tiny_folder, None, backend="hf")
    assert "expected backend sglang_server or vllm_server, url and spool" in refusal(registry)


def test_a_taken_port_is_refused(registry: Path, tiny_folder: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        write_target(registry, tiny_folder, {"url": url, "spool": str(tmp_path / "spool")})
        assert "expected a free port" in refusal(registry)


@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_captures_and_answers_find_in_it_what_their_entry_asks_for(registry: Path):
    words = ["-m", "draftworks.programs.cli", "engine", "small", "--registry", str(registry)]
    with ending(subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)) as serving:
        lines = []
        while not any("serves at" in line for line in lines):
            lines.append(serving.stdout.readline())
            assert lines[-1], lines
        found = Registry(registry)
        target = found.load_target("small")
        files, client = resolve_target(target, found, FileDigests()), SGLangClient(target.capture.server.url, HANG_S)
        info = require_server(client, files, target.capture, LAYERS, longest=target.max_length)
        assert set(LAYERS) <= set(info.layer_ids)
        processes = [psutil.Process(serving.pid), *psutil.Process(serving.pid).children(recursive=True)]
        assert len(processes) > 1
        serving.send_signal(signal.SIGINT)
        wait_until_ended(*processes)
        assert serving.wait() == 0
