"""A stand-in for the package `sglang`: an Engine with recorded answers, whose faults a test chooses."""

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_sglang import generated, part_of

from draftworks.sglang.spool import write_part


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
