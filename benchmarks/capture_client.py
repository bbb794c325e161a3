"""Processor time that the client of a capture through SGLang needs for a token: reading, checking and storing.

    python benchmarks/capture_client.py                     # H = 4096, 3 taps and `last` in bfloat16, 1,024 tokens a sample

There is no server: its parts lie in the spool when it is asked, as links to files that are made beforehand. All else is
a stored capture: requests, parts, checks, shards with their checksums. What is counted is the processor time of this
process, of all its threads, in one thread of torch. The aim was twice the 5,000 to 6,000 tokens/s of a client that
checked values with `isfinite`, copied every stream twice more, and took turns with the server.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer

from draftworks.capture.engine import make_engine_identity
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.session import capture_missing
from draftworks.config.capture import CaptureSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.errors import EngineError
from draftworks.handover.spool import Part, write_part
from draftworks.servers.client import GenerateRequest, Generation

TAPS = (2, 18, 33)
VOCAB = 32_000


class ReadyHost(EngineHost):
    """A host whose parts are ready: `generate` links them into the spool under the request's id."""

    version = "0.5.23"

    def __init__(self, folder: Path, rows: Sequence[TokenRow], hidden: int) -> None:
        self.spool, self._ready, self.client = folder / "spool", folder / "ready", self
        self.layer_ids = tuple(tap - 1 for tap in TAPS)
        self._names = {tuple(row.input_ids.tolist()): row.sample_id for row in rows}
        for made in (self.spool, self._ready):
            made.mkdir()
        for row in rows:
            ids = torch.from_numpy(row.input_ids).long()
            streams = torch.randn(len(TAPS) + 1, len(ids), hidden).bfloat16()
            write_part(self._ready, row.sample_id, Part(0, ids, streams[:-1], streams[-1].clone()))

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        for request in requests:
            ready = self._ready / f"{self._names[tuple(request.input_ids)]}.0.safetensors"
            os.link(ready, self.spool / f"{request.request_id}.0.safetensors")
        return [Generation((1,), "length", 0) for _ in requests]

    def revive(self, error: EngineError) -> None:
        raise error

    def close(self) -> None:
        pass


def measure(samples: int, length: int, hidden: int, folder: Path) -> float:
    """Return tokens per second of processor time."""
    generator = np.random.default_rng(0)
    rows = [
        TokenRow(f"s{number}", generator.integers(5, VOCAB, length).astype(np.int32), np.ones(length, np.bool_))
        for number in range(samples)
    ]
    target = TargetFiles(
        name="made-up", model="none", tokenizer="none", digest="0" * 16, tokenizer_digest="0" * 16, num_layers=36,
        hidden_size=hidden, vocab_size=VOCAB, context=length,
    )  # fmt: skip
    capture = CaptureSpec(backend="sglang_server", batch_tokens=2 * length)
    engine = SGLangEngine(target, make_engine_identity(capture), ReadyHost(folder, rows, hidden), dtype=torch.bfloat16)
    store = StoreSpec(root=folder / "store")
    run = CaptureRun(out=folder / "out", target=target, tokens=folder, taps=list(TAPS), capture=capture, store=store)
    with mock.patch("draftworks.capture.session.verify_head_of"):  # of the first samples only, and there is no head
        started = time.process_time()
        capture_missing(run, lambda: engine, rows)
        return samples * length / (time.process_time() - started)


def main(
    samples: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 1024,
    hidden: Annotated[int, typer.Option(min=1)] = 4096,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    folder: Annotated[Path, typer.Option(help="Where spool and store are.")] = Path("/dev/shm"),
) -> None:
    """Print a small table and one line of JSON."""
    torch.set_num_threads(1)
    found = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="capture_client.", dir=folder) as place:
            found.append(round(measure(samples, length, hidden, Path(place))))
    print(f"{'tokens/s a core':>16} {'slowest':>9} {'fastest':>9}")
    print(f"{statistics.median(found):>16,.0f} {min(found):>9,} {max(found):>9,}")
    print(json.dumps({"hidden": hidden, "length": length, "samples": samples, "tokens_per_core_s": found}))


if __name__ == "__main__":
    typer.run(main)
