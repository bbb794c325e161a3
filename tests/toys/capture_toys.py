"""Token rows and engines for the tests of capture."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from draftworks.capture.engine import Generated, TargetEngine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.storage.identity import EngineIdentity, LastHidden, LayerTap


def random_rows(count: int, seed: int = 0, longest: int = 30, vocab: int = 2000) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, vocab, int(rng.integers(1, longest))).astype(np.int32) for _ in range(count)]
    return [TokenRow(f"s{seed}-{i}", row, np.ones(len(row), np.bool_)) for i, row in enumerate(ids)]


def capture_run(target: TargetFiles, folder: Path, **capture) -> CaptureRun:
    settings = {"dtype": "float32", "compute_dtype": "float32", "batch_tokens": 120, "device": "cpu"}
    return CaptureRun(
        out=folder / "out",
        target=target,
        tokens=folder / "tokens",
        taps=[2, 4],
        capture=CaptureSpec(**{**settings, **capture}),
        store=folder / "store",
    )


def changed_copy(target: TargetFiles, folder: Path, share: float) -> TargetFiles:
    """A copy of a target whose fourth layer writes so much more than the original's."""
    shutil.copytree(target.model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] *= 1 + share
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return target.model_copy(update={"model": str(folder)})


class WatchedEngine(TargetEngine):
    """Passes everything on to an engine, remembers what was asked, and can be told to damage a stream."""

    backend = "hf"
    identity = EngineIdentity("hf-float32")
    last_hidden = LastHidden()

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        self.loads = 0
        self.rows: list[tuple[int, ...]] = []
        self.taps: set[str] = set()
        self.damage = None
        self.shared_after: int | None = None

    def share_with_job(self) -> None:
        """Note how many rows it had captured before it was shared."""
        self.shared_after = len(self.rows)

    def __call__(self) -> WatchedEngine:
        self.loads += 1
        return self

    def capture(self, sequences, taps):
        self.rows += [tuple(row) for row in sequences]
        self.taps |= {tap.name for tap in taps}
        captured = self._engine.capture(sequences, taps)
        return captured if self.damage is None else [self.damage(streams) for streams in captured]

    def logits(self, sequences):
        return self._engine.logits(sequences)

    def head_logits(self, last):
        return self._engine.head_logits(last)

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()) -> list[Generated]:
        self.rows += [tuple(prompt) for prompt in prompts]
        return self._engine.generate(prompts, sampling, sample_ids, max_total, turn, end_ids)


class OneLayerOff(WatchedEngine):
    """Takes every stream one layer too late, as a server with another convention of layer ids does."""

    def capture(self, sequences, taps):
        found = super().capture(sequences, [LayerTap(tap.hf_index + 1) for tap in taps])
        names = [*(tap.name for tap in taps), "last"]
        return [dict(zip(names, streams.values(), strict=True)) for streams in found]
