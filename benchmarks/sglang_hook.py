"""Cost of capture through SGLang's forward hook, compared with a forward pass over the same sequences without it.

    python benchmarks/sglang_hook.py                      # 8 layers of 512, 8 sequences of 256 tokens, fp32 on CPU
    python benchmarks/sglang_hook.py --hidden 256 --length 128

Two real servers of one random Llama, one with our hook and one without, get the same tokens in turns: one new token per
sequence, so a request is little more than its prompt. The time of a capture includes hook, spool, reading and checking.
The aim is a ratio of at most 1.1.
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

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from draftworks.capture.engine import EnginePlace, TargetEngine, load_engine
from draftworks.config.registry_files import CaptureSpec, ResponseSpec, SGLangSpec
from draftworks.config.run_files import TargetFiles
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


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds for one batch; `ratio` is the median of capture over bare, turn by turn."""

    hidden: int
    layers: int
    length: int
    batch: int
    taps: int
    bare_ms: float
    capture_ms: float
    ratio: float
    mib_per_batch: float


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


def start_engine(target: TargetFiles, folder: Path, python: Path, taps: tuple[LayerTap, ...] | None) -> TargetEngine:
    """Start a server; without taps it has no hook."""
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", dtype="float32", device="cpu")
    place = EnginePlace(
        folder=folder, taps=taps, head=lambda: TargetParts.load(target).head, sglang=SGLangSpec(python=str(python))
    )
    return load_engine(target, capture, torch.device("cpu"), place)


def time_ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def measure(case: Case, repeats: int, python: Path, folder: Path) -> Result:
    target = write_random_llama(folder / "model", case)
    taps = tuple(map(LayerTap, torch.linspace(1, case.layers - 1, case.taps).long().tolist()))
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(10, VOCAB, (case.batch, case.length), generator=generator).tolist()
    names, one_token = [str(index) for index in range(case.batch)], ResponseSpec(max_new_tokens=1)
    bare, capture = [], []
    with ExitStack() as closing:
        plain = start_engine(target, folder / "plain", python, None)
        closing.callback(plain.close)
        hooked = start_engine(target, folder / "hooked", python, taps)
        closing.callback(hooked.close)
        for turn in range(repeats + 1):
            times = [
                time_ms(lambda: plain.generate(sequences, one_token, names, target.context)),
                time_ms(lambda: hooked.capture(sequences, taps)),
            ]
            if turn > 0:  # the first warms up
                for found, value in zip((bare, capture), times):
                    found.append(value)
    streams = len(taps) + 1
    return Result(
        **asdict(case),
        bare_ms=round(statistics.median(bare), 1),
        capture_ms=round(statistics.median(capture), 1),
        ratio=round(statistics.median(c / b for c, b in zip(capture, bare)), 3),
        mib_per_batch=round(case.batch * case.length * streams * case.hidden * 4 / 2**20, 1),
    )


def main(
    hidden: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=2)] = 8,
    length: Annotated[int, typer.Option(min=8)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    python: Annotated[Path, typer.Option(help="Of the environment with SGLang.")] = ROOT
    / ".venv-sglang"
    / "bin"
    / "python",
) -> None:
    """Print a small table and one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="sglang_hook.") as folder:
        result = measure(Case(hidden, layers, length, batch), repeats, python, Path(folder))
    print(f"{'size':>10} {'bare ms':>9} {'capture ms':>11} {'ratio':>6} {'MiB':>7}")
    size = f"{length}x{batch}"
    print(f"{size:>10} {result.bare_ms:9.1f} {result.capture_ms:11.1f} {result.ratio:6.2f} {result.mib_per_batch:7.1f}")
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    typer.run(main)
