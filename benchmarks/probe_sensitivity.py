"""Sensitivity of the probe to changed weights, and the effect of rounding: `python benchmarks/probe_sensitivity.py`.

For each dtype and stream of the embedded target: the difference of a correct engine, the allowed difference, and the
difference of the next layer's stream; then the smallest relative noise in all weights of one layer that is rejected.
Prints a table; `--json FILE` writes it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftworks.capture.engines.hf import HFTargetEngine, load_hf_engine
from draftworks.capture.probe.probe import KnownStream, build_known_streams, compare_stream
from draftworks.capture.probe.streamed_forward import StreamedTarget
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.identity import LayerTap

MODEL = Path(__file__).resolve().parents[1] / "registry" / "models" / "tiny"
LAYER = 3
SHARES = [0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
DTYPES = ("float32", "float16", "bfloat16")
CPU = torch.device("cpu")


def make_target(folder: Path) -> TargetFiles:
    return TargetFiles(
        name="tiny",
        model=str(folder),
        tokenizer=str(folder),
        digest="0" * 16,
        tokenizer_digest="0" * 16,
        num_layers=8,
        hidden_size=128,
        vocab_size=2048,
        context=512,
    )


def draw_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 2000, (length,), generator=generator).tolist() for length in (64, 24, 24)]


def capture_streams(engine: HFTargetEngine) -> dict[str, list[torch.Tensor]]:
    rows = engine.capture(draw_prompts(), [LayerTap(k) for k in range(engine.num_layers)])
    return {name: [row[name] for row in rows] for name in rows[0]}


def load_engine(folder: Path, dtype: str) -> HFTargetEngine:
    spec = CaptureSpec(device="cpu").model_copy(update={"compute_dtype": dtype})
    return load_hf_engine(make_target(folder), spec, CPU)


@contextmanager
def changed_weights(share: float) -> Iterator[Path]:
    """Context with a copy of the target whose layer `LAYER` has noise, relative to each weight matrix's deviation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(MODEL, name, dirs_exist_ok=True))
        weights = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        for key, weight in weights.items():
            if f"layers.{LAYER}." in key and weight.dim() == 2:
                weight += share * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


def is_rejected(folder: Path, dtype: str, known: dict[str, KnownStream]) -> bool:
    return not all(
        compare_stream(name, rows, known).sound for name, rows in capture_streams(load_engine(folder, dtype)).items()
    )


def measure(dtype: str) -> dict[str, Any]:
    streams = StreamedTarget(make_target(MODEL)).run(draw_prompts(), 8, getattr(torch, dtype))
    known = build_known_streams(streams, getattr(torch, dtype))
    found = capture_streams(load_engine(MODEL, dtype))
    rows = {}
    for index, (name, stream) in enumerate(known.items()):
        following = list(known)[min(index + 1, len(known) - 2)]
        rows[name] = {
            "sound": stream.measure_difference(found[name]),
            "allowed": stream.allowed,
            "one layer on": stream.measure_difference(found[following]) if name != "last" else None,
        }
    noticed = None
    for share in SHARES:
        with changed_weights(share) as folder:
            if is_rejected(folder, dtype, known):
                noticed = share
                break
    return {"dtype": dtype, "streams": rows, "smallest noticed": noticed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = [measure(dtype) for dtype in DTYPES]
    for result in results:
        print(
            f"{result['dtype']}: noise in one layer is noticed from {result['smallest noticed']} of its weights' spread"
        )
        for name, row in result["streams"].items():
            shown = "  ".join(f"{key} {value:.2g}" for key, value in row.items() if value is not None)
            print(f"  {name:5} {shown}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
