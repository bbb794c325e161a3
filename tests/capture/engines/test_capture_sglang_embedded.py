"""Embedded SGLang, with a stand-in: same arguments as a server, failures become errors, no processes are left."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, generated, part_of
from processes import wait_until_ended
from waiting import HANG_S

from draftworks.capture.engine import EnginePlace, load_engine, make_engine_identity
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.handover.spool import write_part
from draftworks.storage.identity import LayerTap


@dataclass
class Wishes:
    """What a test wants of all Engines, and what it finds out about them.

    Attributes:
        ready: whether a start comes to its end; otherwise it waits for the death of its process, as SGLang's does.
        faults: of the next requests: `refuse`, `crash` or `hang`.
        made: arguments of every Engine.
        environments: of every process that an Engine started.
    """

    ready: bool = True
    faults: list[str] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    processes: list[psutil.Process] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Of SGLang's arguments those that we give."""
    for name in ("model-path", "revision", "tokenizer-path", "host", "device", "dtype", "speculative-algorithm"):
        parser.add_argument(f"--{name}")
    for name in ("port", "context-length", "tp-size", "base-gpu-id", "max-total-tokens", "chunked-prefill-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("disable-radix-cache", "sleep-on-idle", "enable-return-aux-hidden-states"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--return-aux-hidden-state-layer-ids", type=int, nargs="+")
    parser.add_argument("--forward-hooks", type=json.loads)
    parser.add_argument("--log-level", default="info")


def engine_class(wishes: Wishes) -> type:
    class Engine:
        def __init__(self, **options: Any) -> None:
            self._options = options
            logging.basicConfig(format="sglang: %(message)s", force=True)
            child = subprocess.Popen([spawn.get_executable(), "-c", "import time; time.sleep(600)"])
            wishes.made.append(options)
            wishes.environments.append(dict(os.environ))
            wishes.processes.append(psutil.Process(child.pid))
            wishes.threads.append(threading.current_thread())
            if not wishes.ready:
                child.wait()
                raise RuntimeError("Rank 0 scheduler died during initialization")

        async def async_generate(self, input_ids: list[list[int]], sampling_params: Any, rid: list[str]) -> Any:
            fault = wishes.faults.pop(0) if wishes.faults else ""
            if fault == "refuse":
                raise ValueError("The input is longer than the model's context length.")
            if fault == "crash":
                os.kill(os.getpid(), signal.SIGQUIT)
            if fault:
                await asyncio.sleep(600)
            spool = Path(self._options["forward_hooks"][0]["config"]["spool"])
            for request_id, prompt in zip(rid, input_ids, strict=True):
                write_part(spool, request_id, part_of(prompt))
            return [generated(*each) for each in zip(rid, input_ids, strict=True)]

        def shutdown(self) -> None:
            """Leaves its process to whoever looks closer."""

    return Engine


@contextmanager
def fake_engine(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Wishes]:
    """A Python that has SGLang, or so it seems."""
    wishes = Wishes()
    metadata = folder / "sglang-0.5.23.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    patch.setattr(sys, "path", [str(folder), *sys.path])
    arguments = SimpleNamespace(add_cli_args=add_cli_args)
    patch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=engine_class(wishes), ServerArgs=arguments))
    yield wishes
    for process in wishes.processes:
        if process.is_running():
            process.kill()


TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip
ROWS = [[7, 3, 9], [4]]
PATIENT = SGLangSpec(start_timeout_s=HANG_S, request_timeout_s=HANG_S, grace_s=5)


@pytest.fixture
def wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wishes]:
    monkeypatch.setattr("draftworks.capture.engines.parts_engine._LONGEST_WAIT_S", 0.0)
    with fake_engine(tmp_path / "site", monkeypatch) as wishes:
        yield wishes


def make_engine(folder: Path, sglang: SGLangSpec = PATIENT, **server) -> SGLangEngine:
    capture = CaptureSpec(backend="sglang", compute_dtype="float32", server=server)
    place = EnginePlace(folder, (LayerTap(2), LayerTap(4)), sglang=sglang)
    return load_engine(TARGET, capture, torch.device("cpu"), place)


@pytest.fixture
def engine(wishes: Wishes, tmp_path: Path) -> Iterator[SGLangEngine]:
    engine = make_engine(tmp_path / "engine")
    yield engine
    engine.close()


def capture_first_ids(engine: SGLangEngine, rows: list[list[int]]) -> list[float]:
    return [streams["hf4"][0, 0].item() - 400 for streams in engine.capture(rows, [LayerTap(4)])]


def test_hidden_states_come_through_the_same_spool(engine):
    assert capture_first_ids(engine, ROWS) == [7, 4]
    assert list(engine.spool.iterdir()) == []


def test_threads_are_answered_at_the_same_time(engine):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda token: capture_first_ids(engine, [[token]]), range(1, 9))) == [
            [n] for n in range(1, 9)
        ]


def test_it_is_set_up_as_a_server_would_be(wishes, tmp_path):
    settings = {"tp_size": 2, "mem_fraction": 0.5, "max_total_tokens": 99, "args": ["--log-level", "error"]}
    make_engine(tmp_path / "engine", **settings).close()
    (made,) = wishes.made
    assert made["disable_radix_cache"] is True
    assert made["chunked_prefill_size"] == -1
    assert made["return_aux_hidden_state_layer_ids"] == [1, 3]
    assert (made["tp_size"], made["mem_fraction_static"], made["max_total_tokens"]) == (2, 0.5, 99)
    assert made["log_level"] == "error"
    assert wishes.environments[0]["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_an_argument_that_sglang_does_not_know_is_refused(wishes, tmp_path):
    with pytest.raises(ConfigError, match="capture.server.args: unrecognized arguments: --tp-sizes 2"):
        make_engine(tmp_path / "engine", args=["--tp-sizes", "2"])
    assert wishes.made == []


def test_its_processes_see_nothing_of_our_process_group_and_we_nothing_of_its_settings(wishes, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("DAGSTER_PIPES_CONTEXT", "x")
    before, handlers = dict(os.environ), list(logging.getLogger().handlers)
    engine = make_engine(tmp_path / "engine")
    (seen,) = wishes.environments
    assert not {"RANK", "DAGSTER_PIPES_CONTEXT"} & set(seen)
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert dict(os.environ) == before
    assert logging.getLogger().handlers == handlers
    engine.close()


def test_a_process_of_it_that_fails_ends_the_batch_not_us_and_it_is_started_again(engine, wishes):
    wishes.faults = ["crash"]
    assert capture_first_ids(engine, ROWS) == [7, 4]
    assert len(wishes.made) == 2
    wait_until_ended(wishes.processes[0])


def test_a_failure_that_lasts_is_told_after_the_last_attempt(engine, wishes):
    wishes.faults = ["crash"] * 3
    with pytest.raises(EngineError, match="SGLang in this process cannot answer any more: one of its processes failed"):
        capture_first_ids(engine, ROWS)
    assert len(wishes.made) == 3


def test_an_engine_that_hangs_is_told(wishes, tmp_path):
    engine = make_engine(tmp_path / "engine", PATIENT.model_copy(update={"request_timeout_s": 0.1, "attempts": 1}))
    wishes.faults = ["hang"]
    with pytest.raises(EngineError, match=r"did not answer within 0.1 s \(sglang.request_timeout_s"):
        capture_first_ids(engine, ROWS)
    engine.close()


def test_a_refused_request_is_not_tried_again(engine, wishes):
    wishes.faults = ["refuse"]
    with pytest.raises(CaptureError, match="refused a request: .*longer than the model's context"):
        capture_first_ids(engine, ROWS)
    assert len(wishes.made) == 1


def test_closing_ends_the_requests_of_other_threads_and_every_process(engine, wishes):
    wishes.faults = ["hang"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(capture_first_ids, engine, ROWS)
        while wishes.faults:
            assert not waiting.done() or waiting.result()
        engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            waiting.result()
    wait_until_ended(wishes.processes[0])
    assert not wishes.threads[0].is_alive()


def test_our_own_signal_handler_is_back_after_the_end(wishes, tmp_path):
    before = signal.getsignal(signal.SIGQUIT)
    engine = make_engine(tmp_path / "engine")
    assert signal.getsignal(signal.SIGQUIT) != before
    engine.close()
    assert signal.getsignal(signal.SIGQUIT) == before


def test_an_engine_that_is_never_ready_is_ended_with_its_processes(wishes, tmp_path):
    before = signal.getsignal(signal.SIGQUIT)
    wishes.ready = False
    with pytest.raises(EngineError, match=r"was not ready within 1 s \(sglang.start_timeout_s"):
        make_engine(tmp_path / "engine", PATIENT.model_copy(update={"start_timeout_s": 1}))
    wait_until_ended(*wishes.processes)
    assert signal.getsignal(signal.SIGQUIT) == before


def test_an_engine_that_dies_while_it_starts_is_told_with_its_reason(wishes, tmp_path):
    wishes.ready = False
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_first, wishes)
        with pytest.raises(EngineError, match="did not start: RuntimeError: Rank 0 scheduler died"):
            make_engine(tmp_path / "engine")
        killing.result()


def kill_first(wishes: Wishes) -> None:
    while not wishes.threads:
        threading.Event().wait(0.05)
    wishes.processes[0].kill()


def test_a_python_without_sglang_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)this Python, .* has none.*sglang.python.*backend sglang_server"):
        make_engine(tmp_path / "engine")


def test_in_process_and_behind_http_it_is_one_engine_with_one_set_of_keys():
    ours, served, plain = (CaptureSpec(backend=name) for name in ("sglang", "sglang_server", "hf"))
    assert make_engine_identity(ours) == make_engine_identity(served) != make_engine_identity(plain)
    assert ours.to_identity() == served.to_identity() != plain.to_identity()
