"""Capture through SGLang, compared with the server's own prefill of the same sequences without our hook.

    python benchmarks/sglang_hook.py                      # 8 layers of 512, 8 sequences of 256 tokens, fp32 on CPU
    python benchmarks/sglang_hook.py --hidden 832 --layers 12 --length 128 --batch 4 --repeats 3     # 110 M parameters

Two real servers of one random Llama, one with our hook and one without, get the same tokens in turns, `batches` of them
in flight: one new token per sequence, so a request is little more than its prompt. The time of a capture includes hook,
spool, reading, checking and storing. The aim is at least 0.95 of the rate of the server without a hook.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from draftworks.capture.background import run_in_background
from draftworks.capture.engine import EnginePlace, TargetEngine, load_engine
from draftworks.capture.session import capture_missing
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.drafts.target_parts import TargetParts
from draftworks.storage.identity import LayerTap

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "registry" / "models" / "tiny"
VOCAB = 2048


@dataclass(frozen=True)
class Case:
    """Size of the target, and the sequences of one request."""

    hidden: int = 512
    layers: int = 8
    length: int = 256
    batch: int = 8
    taps: int = 3
    batches: int = 4


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds for all batches; `share` is the median of bare over capture, turn by turn."""

    hidden: int
    layers: int
    length: int
    batch: int
    taps: int
    batches: int
    parameters: int
    bare_ms: float
    capture_ms: float
    share: float
    mib: float


def write_random_llama(folder: Path, case: Case) -> TargetFiles:
    """Write a Llama of random weights, in fp32."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 64,
        max_position_embeddings=2 * case.length,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return TargetFiles(
        name="random",
        model=str(folder),
        tokenizer=str(TOKENIZER),
        digest="0" * 16,
        tokenizer_digest="0" * 16,
        num_layers=case.layers,
        hidden_size=case.hidden,
        vocab_size=VOCAB,
        context=2 * case.length,
    )


def make_capture(case: Case) -> CaptureSpec:
    size = case.batch * case.length
    return CaptureSpec(
        backend="sglang_server", compute_dtype="float32", dtype="float32", device="cpu", batch_tokens=size
    )


def start_engine(
    target: TargetFiles, capture: CaptureSpec, folder: Path, python: Path, taps: tuple[LayerTap, ...] | None
) -> TargetEngine:
    """Start a server; without taps it has no hook."""
    place = EnginePlace(
        folder=folder, taps=taps, head=lambda: TargetParts.load(target).head, sglang=SGLangSpec(python=str(python))
    )
    return load_engine(target, capture, torch.device("cpu"), place)


def time_ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def measure(case: Case, repeats: int, python: Path, folder: Path) -> Result:
    target, spec = write_random_llama(folder / "model", case), make_capture(case)
    taps = tuple(map(LayerTap, torch.linspace(1, case.layers - 1, case.taps).long().tolist()))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, VOCAB, (case.batches * case.batch, case.length), generator=generator)
    rows = [TokenRow(f"s{index}", row.int().numpy(), np.ones(case.length, np.bool_)) for index, row in enumerate(ids)]
    names, one_token = [str(index) for index in range(case.batch)], ResponseSpec(max_new_tokens=1)

    def prefill() -> None:
        batches = ids.view(case.batches, case.batch, case.length).tolist()
        running = [run_in_background(plain.generate, each, one_token, names, target.context) for each in batches]
        for each in running:
            each.result()

    def capture() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            store, out = StoreSpec(root=Path(place) / "store"), Path(place) / "out"
            hf = [tap.hf_index for tap in taps]
            run = CaptureRun(out=out, target=target, tokens=folder, taps=hf, capture=spec, store=store)
            with mock.patch("draftworks.capture.session.verify_head_of"):  # of the first samples of a capture only
                assert capture_missing(run, lambda: hooked, rows).captured == len(rows)

    bare_ms, capture_ms = [], []
    with ExitStack() as closing:
        plain = start_engine(target, spec, folder / "plain", python, None)
        closing.callback(plain.close)
        hooked = start_engine(target, spec, folder / "hooked", python, taps)
        closing.callback(hooked.close)
        for turn in range(repeats + 1):
            times = [time_ms(prefill), time_ms(capture)]
            if turn > 0:  # the first warms up
                for found, value in zip((bare_ms, capture_ms), times):
                    found.append(value)
    nbytes = ids.numel() * (len(taps) + 1) * case.hidden * 4
    return Result(
        **asdict(case),
        parameters=TargetParts.load(target).head.numel() * 2 + case.layers * 13 * case.hidden**2,
        bare_ms=round(statistics.median(bare_ms), 1),
        capture_ms=round(statistics.median(capture_ms), 1),
        share=round(statistics.median(b / c for c, b in zip(capture_ms, bare_ms)), 3),
        mib=round(nbytes / 2**20, 1),
    )


def main(
    hidden: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=2)] = 8,
    length: Annotated[int, typer.Option(min=8)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    batches: Annotated[int, typer.Option(min=1, help="Batches in flight.")] = 4,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    python: Annotated[Path, typer.Option(help="Of the environment with SGLang.")] = ROOT
    / ".venv-sglang"
    / "bin"
    / "python",
) -> None:
    """Print a small table and one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="sglang_hook.") as folder:
        case = Case(hidden, layers, length, batch, batches=batches)
        result = measure(case, repeats, python, Path(folder))
    print(f"{'size':>12} {'parameters':>11} {'bare ms':>9} {'capture ms':>11} {'share':>6} {'MiB':>7}")
    size, parameters = f"{length}x{batch}x{batches}", f"{result.parameters / 1e6:.0f} M"
    figures = f"{result.bare_ms:9.1f} {result.capture_ms:11.1f} {result.share:6.3f} {result.mib:7.1f}"
    print(f"{size:>12} {parameters:>11} {figures}")
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    typer.run(main)
