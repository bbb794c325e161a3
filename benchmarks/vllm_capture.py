"""Capture through vLLM in process, compared with the same engine that captures nothing, in CPU seconds.

    python benchmarks/vllm_capture.py --model FOLDER               # a real model, such as SmolLM2-135M-Instruct in fp32
    python benchmarks/vllm_capture.py                              # a random Llama of 8 layers of 512

Two processes of vLLM's Python, one that captures and one with the same flags without `speculative_config` and connector,
get the same tokens in turns: one new token per sequence, prefix cache off, all sequences at once. The time of a capture
includes connector, spool, reading, checking and storing; it is that of the processor, all threads of the process. The aim
is at least 0.9 of the rate of the engine that captures nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.session import capture_missing
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.drafts.target_parts import TargetParts
from draftworks.storage.identity import LayerTap
from draftworks.vllm.environment import VLLM

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "registry" / "models" / "tiny"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TAPS = 3


@dataclass(frozen=True)
class Result:
    """Medians in CPU seconds for all sequences; `share` is the median of bare over capture, turn by turn."""

    model: str
    layers: int
    hidden: int
    sequences: int
    length: int
    taps: int
    turns: int
    bare_s: float
    capture_s: float
    share: float
    mib: float


def write_random_llama(folder: Path) -> None:
    """Write a Llama of random weights, in fp32."""
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def describe_target(folder: Path, context: int) -> TargetFiles:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return TargetFiles(
        name="measured",
        model=str(folder),
        tokenizer=str(folder if (folder / "tokenizer.json").exists() else TOKENIZER),
        digest="0" * 16,
        tokenizer_digest="0" * 16,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=context,
    )


def serve(target: TargetFiles, captures: bool, sequences: int, length: int, folder: Path) -> None:
    """Answer each line of input with the CPU seconds of one turn; the body of a process of vLLM's Python."""
    taps = tuple(map(LayerTap, torch.linspace(1, target.num_layers - 1, TAPS).long().tolist()))
    spec = CaptureSpec(
        backend="vllm", compute_dtype="float32", dtype="float32", device="cpu", batch_tokens=sequences * length
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, target.vocab_size, (sequences, length), generator=generator)
    rows = [TokenRow(f"s{index}", row.int().numpy(), np.ones(length, np.bool_)) for index, row in enumerate(ids)]
    place = EnginePlace(folder / "engine", taps if captures else None, lambda: TargetParts.load(target).head)
    engine = load_engine(target, spec, torch.device("cpu"), place)

    def prefill() -> None:
        names = [str(index) for index in range(sequences)]
        engine.generate(ids.tolist(), ResponseSpec(max_new_tokens=1), names, target.context)

    def capture() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            store, out = StoreSpec(root=Path(place) / "store"), Path(place) / "out"
            hf = [tap.hf_index for tap in taps]
            run = CaptureRun(out=out, target=target, tokens=folder, taps=hf, capture=spec, store=store)
            with mock.patch("draftworks.capture.session.verify_head_of"):  # of the first samples of a capture only
                assert capture_missing(run, lambda: engine, rows).captured == len(rows)

    turn: Callable[[], None] = capture if captures else prefill
    for _ in sys.stdin:
        began = time.process_time()
        turn()
        print(f"cpu {time.process_time() - began}", flush=True)
    engine.close()


@contextmanager
def started(python: Path, words: list[str], folder: Path) -> Iterator[Callable[[], float]]:
    """Yield what asks a process for one turn."""
    folder.mkdir()
    environment = {**os.environ, **VLLM.build_program_environment(python, folder / "package")}
    command = [str(python), __file__, *words, "--folder", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        def ask() -> float:
            questions.write("\n")
            questions.flush()
            for line in answers:
                if line.startswith("cpu "):
                    return float(line.split()[1])
            raise RuntimeError("the process ended: its messages are above")

        try:
            yield ask
        finally:
            questions.close()


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of a model; default: a random Llama.")] = None,
    sequences: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(min=8)] = 128,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    python: Annotated[Path, typer.Option(help="Of the environment with vLLM.")] = PYTHON,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch)
        if model is None:
            model = Path(scratch) / "model"
            write_random_llama(model)
        target = describe_target(model, 4 * length)
        if worker:
            return serve(target, worker == "capture", sequences, length, folder)
        words = ["--model", str(model), "--sequences", str(sequences), "--length", str(length)]
        bare_s, capture_s = [], []
        with (
            started(python, [*words, "--worker", "bare"], folder / "bare") as bare,
            started(python, [*words, "--worker", "capture"], folder / "capture") as capture,
        ):
            for turn in range(turns + 1):
                times = [bare(), capture()]
                if turn > 0:  # the first warms up
                    bare_s.append(times[0])
                    capture_s.append(times[1])
    found = _summarize(target, model.name, sequences, length, bare_s, capture_s)
    print(f"{'model':>12} {'bare s':>7} {'capture s':>10} {'share':>6} {'MiB':>6}")
    print(f"{found.model:>12} {found.bare_s:>7.3f} {found.capture_s:>10.3f} {found.share:>6.2f} {found.mib:>6.1f}")
    print(json.dumps(asdict(found)))


def _summarize(
    target: TargetFiles, model: str, sequences: int, length: int, bare_s: list[float], capture_s: list[float]
) -> Result:
    return Result(
        model=model,
        layers=target.num_layers,
        hidden=target.hidden_size,
        sequences=sequences,
        length=length,
        taps=TAPS,
        turns=len(bare_s),
        bare_s=round(statistics.median(bare_s), 3),
        capture_s=round(statistics.median(capture_s), 3),
        share=round(statistics.median(b / c for b, c in zip(bare_s, capture_s, strict=True)), 3),
        mib=round(sequences * length * (TAPS + 1) * target.hidden_size * 4 / 2**20, 1),
    )


if __name__ == "__main__":
    typer.run(main)
